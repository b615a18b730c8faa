"""Crossings between real GPUs: every row arrives whole and in time, with and without random delays."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks.bench_hop import count_turns, measure  # noqa: E402
from benchmarks.split_model.model import Gpus  # noqa: E402

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def gpus():
    return Gpus(2)


@pytest.mark.parametrize("num_bytes", [16, 4096, 65536])
def test_rows_that_grow_by_one_at_each_turn_are_never_stale_or_torn(gpus, num_bytes):
    assert count_turns(gpus, num_bytes, 50_000, delays=False) == 0


def test_delays_on_either_side_lose_nothing(gpus):
    assert count_turns(gpus, 4096, 5_000, delays=True) == 0


@pytest.mark.parametrize("path", ["peer", "host"])
def test_a_hop_takes_microseconds(gpus, path):
    times = sorted(measure(gpus, 4096, path, replays=20))
    assert times[len(times) // 2] < 20.0
