"""The driver is asked for GPUs and their sizes, and nothing is known where there is none."""

from __future__ import annotations

import ctypes

import pytest

from crosspool.backends.cuda.device import gpu_sizes


class FakeDriver:
    """Answers the calls. sizes: of each GPU."""

    def __init__(self, status, sizes):
        self.status, self.sizes = status, sizes

    def cuInit(self, flags):
        assert flags == 0
        return self.status

    def cuDeviceGetCount(self, found):
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = len(self.sizes)
        return 0

    def cuDeviceGet(self, device, index):
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 10 + index
        return 0

    def cuDeviceTotalMem_v2(self, found, device):
        size = self.sizes[device.value - 10]
        ctypes.cast(found, ctypes.POINTER(ctypes.c_size_t))[0] = size
        return 0 if size else 1


@pytest.mark.parametrize(
    ("status", "sizes", "expected"),
    [(0, (80 << 30, 40 << 30), (80 << 30, 40 << 30)), (100, (1,), ()), (3, (1,), None), (0, (1, 0), None)],
)
def test_the_driver_says_which_gpus_there_are(monkeypatch, status, sizes, expected):
    monkeypatch.setattr(gpu_sizes.ctypes, "CDLL", lambda name: FakeDriver(status, sizes))
    assert gpu_sizes.gpu_sizes() == expected


def test_without_a_driver_nothing_is_known(monkeypatch):
    monkeypatch.setattr(gpu_sizes, "LIBRARY", "libnot-here.so.9")
    assert gpu_sizes.gpu_sizes() is None
