"""Small arrays of a step on their way to the device: all in one copy, from host memory that was pinned beforehand.

Pinning memory, allocating it on the device and loading a kernel for the first time may all wait for the device, where
a kernel of another lane may be waiting for a peer, whose host may be waiting in the same way. So none of them may
happen while lanes run: sizes are few, and a load goes through all of them.
"""

from collections.abc import Sequence

import torch

from crosspool.backends.base import Int32Array
from crosspool.units import align_up

_ALIGNED = 32
"""Elements at whose multiples an array begins: 128 bytes."""

PINNED_SIZES = (*((1 << power, 16) for power in range(2, 17)), *((1 << power, 4) for power in range(17, 25)))
"""(bytes, blocks) that a rank's process pins at its start and keeps for later; torch rounds sizes to powers of two."""


def pin_ahead() -> None:
    """Make torch hold pinned blocks of every size that steps use."""
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size, count in PINNED_SIZES for _ in range(count)]
    del held


def upload_all(arrays: Sequence[Int32Array], device: torch.device) -> list[torch.Tensor]:
    """Each array (int32, any shape) on the device, enqueued on torch's current stream."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += align_up(array.size, _ALIGNED)
    is_cuda = device.type == "cuda"
    host = torch.empty(max(1, size), dtype=torch.int32, pin_memory=is_cuda)
    words = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        words[start : start + array.size] = array.ravel()
    whole = host.to(device, non_blocking=True)
    return [whole[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=True)]
