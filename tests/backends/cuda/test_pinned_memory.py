"""Host memory that is to be pinned is there as a whole, and zero."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest

pytest.importorskip("torch")

from crosspool.backends.cuda.pinned_memory import NUM_THREADS, touched_memory

pytestmark = pytest.mark.judge


@pytest.mark.parametrize("num_pages", [1, NUM_THREADS - 1, 4099])
def test_every_page_is_there_before_anybody_asks_for_it(num_pages):
    region = touched_memory(num_pages * mmap.PAGESIZE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert not np.frombuffer(region, np.uint8).any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < max(64, num_pages // 8)
