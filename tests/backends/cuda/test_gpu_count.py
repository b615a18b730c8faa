"""Counting GPUs asks the driver, and knows nothing where there is none."""

from __future__ import annotations

import ctypes

import pytest

from crosspool.backends.cuda.device import gpu_count


class FakeDriver:
    """Answers the two calls."""

    def __init__(self, status, count):
        self.status, self.count = status, count

    def cuInit(self, flags):
        assert flags == 0
        return self.status

    def cuDeviceGetCount(self, found):
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self.count
        return 0


@pytest.mark.parametrize(("status", "count", "expected"), [(0, 4, 4), (100, 7, 0), (3, 7, None)])
def test_the_driver_says_how_many_gpus_there_are(monkeypatch, status, count, expected):
    monkeypatch.setattr(gpu_count.ctypes, "CDLL", lambda name: FakeDriver(status, count))
    assert gpu_count.count_gpus() == expected


def test_without_a_driver_nothing_is_known(monkeypatch):
    monkeypatch.setattr(gpu_count, "LIBRARY", "libnot-here.so.9")
    assert gpu_count.count_gpus() is None
