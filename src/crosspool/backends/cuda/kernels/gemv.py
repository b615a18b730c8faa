"""Skinny matrix products for few tokens: y = x W^T, with an optional norm before and bias and residual after."""

import torch

from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.params import GemvParams, address
from crosspool.units import ceil_div

MAX_TOKENS = 32
_VARIANTS = ((1, 4), (1, 6), (4, 2), (4, 4), (4, 6), (8, 4), (16, 4), (16, 8), (16, 10))
_FEW_ROWS = ((2048, (8, 2, 6)), (4096, (8, 2, 14)), (5120, (8, 6, 14)))
"""Shapes with chunks in shared memory, by the longest k they take; above 1,024."""
_MANY_ROWS = (8, 4, 4)
_LONE_TOKEN = {(8, 6, 14): (8, 2, 18), (8, 4, 4): (8, 2, 6)}
"""What takes a shape's place for one token, whose columns leave more shared memory: fewer registers, the same sums."""
_RED_FLOATS, _TILE_COLS = 160, 8
_HELD_BYTES = 2 * 32 * 16
"""Of a warp's chunk: 16 bytes of two rows a lane."""


def variant(rows: int, k: int, *, norms: bool = False, holds: bool = True, tokens: int = 8) -> tuple[int, int, int]:
    """(warps, chunks of 32 elements of k a warp holds in registers, and in shared memory), by measurement on an H200.

    What shared memory holds is on its way before the wait for the kernel before too, and leaves registers to kernels
    beside this one. With a norm it holds nothing, and k takes one pass. holds: whether there is shared memory for that.
    """
    if 1024 < k <= 2048 and rows > 32768 and not norms:
        return 8, 4, 0
    if holds and not norms and k > 1024:
        if k <= 2048 and rows > 4500:
            return _lone_or(_MANY_ROWS, tokens)
        if k <= 2048 and rows > 3000:  # smaller blocks
            return 4, 8, 8
        for longest, shape in _FEW_ROWS:
            if k <= longest and rows <= 4500:
                return _lone_or(shape, tokens)
    for warps, chunks in _VARIANTS:
        if warps * chunks * 32 >= k:
            return warps, chunks, 0
    return 16, 8, 0


def _lone_or(shape: tuple[int, int, int], tokens: int) -> tuple[int, int, int]:
    return _LONE_TOKEN.get(shape, shape) if tokens == 1 else shape


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
    shape: tuple[int, int, int] | None = None,
) -> None:
    """y[t, (g,) r] = sum_k weight[(g,) r, k] x[t, (g,) k]  (+ bias[r])  (+ residual[t, r]).

    weight: (rows, k) or (groups, rows, k) bf16, contiguous, k a multiple of 8, 16-byte aligned.
    x: (tokens, k) or (tokens, groups, k), last dimension contiguous, bf16; tokens <= 32.
    y: (tokens, rows) or (tokens, groups, rows), last dimension contiguous, bf16 or fp32; written whole.
    norm_weight: (k) bf16: x is RMS-normalised with `norm_eps` first. residual: (tokens, rows) fp32, may be y.
    shape: as from `variant`, for tuning; with chunks in shared memory or a norm, k must fit one pass.
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
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}; it must be bfloat16")
    warps, chunks, held = shape or variant(
        rows, k, norms=norm_weight is not None, holds=kernels.is_hopper, tokens=tokens
    )
    if held and norm_weight is not None:
        raise ValueError(f"shape {shape} has no norm; give it no chunks held")
    if (held or norm_weight is not None) and warps * (chunks + held) * 32 < k:
        raise ValueError(f"shape {warps, chunks, held} does not take k {k} in one pass; give it more chunks")
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
        y_is_float=y.dtype == torch.float32,
        norm_eps=norm_eps,
    )
    staged = min(tokens, _TILE_COLS) * (chunks + held + 1) * 64 if held or norm_weight is not None else 0
    staged += (chunks + held) * 64 if norm_weight is not None else 0
    suffix = f"_s{held}" if held else "_norm" if norm_weight is not None else ""
    kernels.launch(
        "gemv",
        f"gemv_w{warps}_c{chunks}{suffix}",
        grid=(ceil_div(rows, 16), groups, 1),
        threads=warps * 32,
        smem_bytes=warps * ((_RED_FLOATS + _TILE_COLS) * 4 + held * _HELD_BYTES + staged),
        params=params,
        overlap=overlap,
    )
