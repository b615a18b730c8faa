"""Kernels of `csrc/chunk_attention.cu` that give each row a warp."""

import ctypes

from crosspool.backends.cuda.device.launch import Launcher
from crosspool.units import ceil_div

_WARPS = 4


def launch_rows(kernels: Launcher, kernel: str, rows: int, params: ctypes.Structure) -> None:
    """Enqueue `kernel` with a warp for each of `rows`, four to a block, behind all that is enqueued."""
    kernels.launch(
        "chunk_attention",
        kernel,
        grid=(ceil_div(rows, _WARPS), 1, 1),
        threads=_WARPS * 32,
        smem_bytes=0,
        params=params,
        overlap=False,
    )
