"""A device's queues, and the streams that take them: streams that share one wait for each other."""

import os
from functools import cache
from typing import Any, Literal

import torch

from crosspool.backends.cuda.device.driver import call

MAX_CONNECTIONS = 32
"""Queues of the device. With fewer than streams, two lanes share one, and a lane whose kernel waits for its peer there
holds up the other one, for which that peer may be waiting; a run that lies ready behind another does the same. So a
process makes no stream that it does not need, and none by torch, which makes 32 of each priority with the first and
gives them out again after those."""

DECODE_STREAM_PRIORITY = -1
"""Of streams that passes run on; prompts have 0, which is lower."""


def ask_for_queues() -> None:
    """Have this process use as many queues as there are; CUDA reads that when it starts."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(MAX_CONNECTIONS))


def own_stream(device: torch.device, priority: int = 0) -> Any:
    """A new stream, for as long as the process lives, whatever the thread has used before. Raises CudaError."""
    from cuda.bindings import driver

    call("cuInit", 0)
    primary = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device.index or 0))
    call("cuCtxPushCurrent", primary)  # torch leaves a thread that has done nothing on the device without one
    try:
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = call("cuStreamCreateWithPriority", flags, priority, what=f"a stream on {device}")
    finally:
        call("cuCtxPopCurrent")
    return torch.cuda.ExternalStream(int(handle), device)


@cache
def stream_for(purpose: Literal["captures", "loads", "zeros"], device: torch.device) -> Any:
    """The one that all ranks of this process have for it: none of their kernels waits for a peer there."""
    return own_stream(device, DECODE_STREAM_PRIORITY if purpose == "captures" else 0)
