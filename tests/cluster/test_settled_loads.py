"""What a rank has loaded is no work for its garbage collector."""

from __future__ import annotations

import gc

from crosspool.cluster.rank_process import SettledLoads
from tests.support.loading import start_now


def test_what_was_loaded_is_frozen_and_the_load_has_run():
    kept = []
    try:
        before = gc.get_freeze_count()
        SettledLoads(start_now)(lambda: kept.extend([[]] for _ in range(10_000)), "load-m")
        assert len(kept) == 10_000
        assert gc.get_freeze_count() >= before + 10_000
    finally:
        gc.unfreeze()
