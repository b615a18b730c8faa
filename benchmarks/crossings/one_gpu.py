"""Both sides of a crossing on one GPU: the weights side leaves one multiprocessor to the other."""

from __future__ import annotations

import torch

from benchmarks.crossings.most_of_a_gpu import MostOfAGpu
from benchmarks.split_model.model import Gpus
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.device.queues import ask_for_queues


class OneGpu(Gpus):
    """Stands where several GPUs would: crossings stay within L2, so they take about a microsecond less each.

    servers: how many weights sides share the multiprocessors that are left.
    """

    def __init__(self, servers: int = 1) -> None:
        ask_for_queues()
        device = torch.device("cuda", 0)
        kernels = DeviceKernels(device)
        share = MostOfAGpu(kernels, (kernels.num_sms - 1) // servers)
        self.devices = [device] * (1 + servers)
        self.kernels = [kernels, *[share] * servers]  # type: ignore[list-item]
