"""A launcher for kernels that are to leave some multiprocessors of their GPU to others."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from crosspool.backends.cuda.device.launch import DeviceKernels


class MostOfAGpu:
    """Kernels that hold `num_sms` multiprocessors of a GPU, not all of them."""

    def __init__(self, whole: DeviceKernels, num_sms: int) -> None:
        self._whole, self.num_sms = whole, num_sms
        self.device: torch.device = whole.device
        self.is_hopper, self.has_warpgroups = bool(whole.is_hopper), bool(whole.has_warpgroups)
        self.has_clusters = False  # a server may hold the rest

    def launch(self, source: str, kernel: str, *, params: ctypes.Structure, **options: Any) -> None:
        self._whole.launch(source, kernel, params=params, **options)
