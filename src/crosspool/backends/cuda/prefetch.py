"""Brings weights into L2 while nothing else uses the device's memory, such as during a wait for another GPU."""

from collections.abc import Sequence

import torch

from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.params import MAX_REGIONS, PrefetchParams, address


def prefetch(kernels: Launcher, tensors: Sequence[torch.Tensor], *, blocks: int = 32, overlap: bool = True) -> None:
    """Read `tensors` (at most 16, contiguous) into L2; more than L2 holds is wasted.

    blocks: how many multiprocessors it may keep busy.
    """
    if len(tensors) > MAX_REGIONS:
        raise ValueError(f"{len(tensors)} tensors to prefetch; one launch takes {MAX_REGIONS}")
    params = PrefetchParams(num_regions=len(tensors))
    for i, tensor in enumerate(tensors):
        params.regions[i] = address(tensor)
        params.bytes[i] = tensor.numel() * tensor.element_size()
    kernels.launch(
        "prefetch",
        "prefetch_weights",
        grid=(blocks, 1, 1),
        threads=256,
        smem_bytes=0,
        params=params,
        overlap=overlap,
    )
