"""Skinny matrix products for few tokens: y = x W^T, with an optional norm before and bias and residual after."""

import torch

from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.params import GemvParams, address
from crosspool.units import ceil_div

MAX_TOKENS = 32
_VARIANTS = ((4, 2), (4, 4), (4, 6), (8, 4), (16, 4), (8, 8), (16, 8), (16, 10))
_RED_FLOATS = 160


def variant(rows: int, k: int) -> tuple[int, int]:
    """(warps, chunks of 32 elements of k a warp): the block that takes k in one pass, by measurement on an H200."""
    if 1024 < k <= 2048:  # many rows: smaller blocks that take k in passes; few: fewer, longer warps
        return (8, 4) if rows > 32768 else (4, 4) if rows > 4500 else (8, 8)
    for warps, chunks in _VARIANTS:
        if warps * chunks * 32 >= k:
            return warps, chunks
    return 16, 8


def gemv(
    kernels: Launcher,
    weight: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    overlap: bool = True,
    shape: tuple[int, int] | None = None,
) -> None:
    """y[t, (g,) r] = sum_k weight[(g,) r, k] x[t, (g,) k]  (+ bias[r])  (+ residual[t, r]).

    weight: (rows, k) or (groups, rows, k) bf16, contiguous, k a multiple of 8, 16-byte aligned.
    x: (tokens, k) or (tokens, groups, k), last dimension contiguous, bf16 (fp32 with `norm_weight`); tokens <= 32.
    y: (tokens, rows) or (tokens, groups, rows), last dimension contiguous, bf16 or fp32; written whole.
    norm_weight: (k) bf16: x is RMS-normalised with `norm_eps` first. residual: (tokens, rows) fp32, may be y.
    shape: (warps, chunks) of one compiled variant, for tuning.
    """
    grouped = weight.dim() == 3
    groups, rows, k = weight.shape if grouped else (1, *weight.shape)
    tokens = x.shape[0]
    expected_x, expected_y = ((tokens, groups, k), (tokens, groups, rows)) if grouped else ((tokens, k), (tokens, rows))
    if tuple(x.shape) != expected_x or tuple(y.shape) != expected_y:
        raise ValueError(f"x {tuple(x.shape)}, y {tuple(y.shape)} do not fit weight {tuple(weight.shape)}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{tokens} tokens; this product takes 1 to {MAX_TOKENS}, use a matrix product beyond")
    if k % 8 or x.stride(0) % 8 or (grouped and x.stride(1) % 8) or weight.data_ptr() % 16 or x.data_ptr() % 16:
        raise ValueError(
            f"k {k}, strides {x.stride()} and addresses must allow 16-byte loads (multiples of 8 elements)"
        )
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or x.stride(-1) != 1 or y.stride(-1) != 1:
        raise ValueError("weight must be contiguous bfloat16, rows of x and y contiguous")
    if x.dtype == torch.float32 and norm_weight is None:
        raise ValueError("x is float32; without a norm it must be bfloat16")
    warps, chunks = shape or variant(rows, k)
    params = GemvParams(
        weight=address(weight),
        x=address(x),
        norm_weight=address(norm_weight),
        bias=address(bias),
        residual=address(residual),
        y=address(y),
        weight_group_stride=rows * k,
        x_group_stride=x.stride(1) if grouped else 0,
        y_group_stride=y.stride(1) if grouped else 0,
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        rows=rows,
        k=k,
        tokens=tokens,
        x_is_float=x.dtype == torch.float32,
        y_is_float=y.dtype == torch.float32,
        norm_eps=norm_eps,
    )
    staged_bytes = tokens * (k + 8) * 2 if norm_weight is not None else 0
    kernels.launch(
        "gemv",
        f"gemv_w{warps}_c{chunks}",
        grid=(ceil_div(rows, 16), groups, 1),
        threads=warps * 32,
        smem_bytes=(warps * _RED_FLOATS + 32) * 4 + staged_bytes,
        params=params,
        overlap=overlap,
    )
