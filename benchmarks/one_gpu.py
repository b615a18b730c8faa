"""Both sides of a crossing on one GPU: the weights side leaves one multiprocessor to the other."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.split_model import Gpus
from crosspool.backends.cuda.launch import DeviceKernels


@dataclass(frozen=True)
class MostOfAGpu:
    """A launcher for kernels that hold `num_sms` multiprocessors of a GPU, not all of them."""

    whole: DeviceKernels
    num_sms: int

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def is_hopper(self) -> bool:
        return bool(self.whole.is_hopper)

    @property
    def has_warpgroups(self) -> bool:
        return bool(self.whole.has_warpgroups)

    def launch(self, source: str, kernel: str, *, params: ctypes.Structure, **options: Any) -> None:
        self.whole.launch(source, kernel, params=params, **options)


class OneGpu(Gpus):
    """Stands where two GPUs would: crossings stay within L2, so they take about a microsecond less each."""

    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        kernels = DeviceKernels(device)
        self.devices = [device, device]
        self.kernels = [kernels, MostOfAGpu(kernels, kernels.num_sms - 1)]  # type: ignore[list-item]
