"""Both sides of a crossing on one GPU: the weights side leaves one multiprocessor to the other."""

from __future__ import annotations

import torch

from benchmarks.crossings.most_of_a_gpu import MostOfAGpu
from benchmarks.split_model.model import Gpus
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.device.queues import ask_for_queues


class OneGpu(Gpus):
    """Stands where two GPUs would: crossings stay within L2, so they take about a microsecond less each."""

    def __init__(self) -> None:
        ask_for_queues()
        device = torch.device("cuda", 0)
        kernels = DeviceKernels(device)
        self.devices = [device, device]
        self.kernels = [kernels, MostOfAGpu(kernels, kernels.num_sms - 1)]  # type: ignore[list-item]
