"""Crossings on real GPUs: every row arrives whole and in time, with and without random delays.

Between two GPUs where there are two, else between two streams of one.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks.bench_hop import count_turns, measure  # noqa: E402
from benchmarks.split_model.model import Gpus  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_GPUS = min(2, torch.cuda.device_count())


@pytest.fixture(scope="module")
def gpus():
    return Gpus(2, NUM_GPUS)


@pytest.mark.parametrize("num_bytes", [16, 4096, 65536])
def test_rows_that_grow_by_one_at_each_turn_are_never_stale_or_torn(gpus, num_bytes):
    assert count_turns(gpus, num_bytes, 50_000, delays=False) == 0


def test_delays_on_either_side_lose_nothing(gpus):
    assert count_turns(gpus, 4096, 5_000, delays=True) == 0


@pytest.mark.skipif(NUM_GPUS < 2, reason="a hop goes from one GPU to another; this machine has one")
@pytest.mark.parametrize("path", ["peer", "host"])
def test_a_hop_takes_microseconds(gpus, path):
    times = sorted(measure(gpus, 4096, path, replays=20))
    assert times[len(times) // 2] < 20.0
