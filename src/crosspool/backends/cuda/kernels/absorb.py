"""One token's query projection together with the product that takes queries to latents."""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.gemv import variant
from crosspool.backends.cuda.kernels.params import AbsorbParams, address, check
from crosspool.units import ceil_div

_LATENTS, _PARTS, _TILE_ROWS = 512, 4, 16
_TILE_BYTES = (160 + 8) * 4
"""What a warp leaves of its sums and squares."""
_CHUNK_BYTES = 2 * 32 * 16
"""Of two rows a lane, held in shared memory."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """csrc/absorb.cuh's `Absorbed`."""

    blocks: int
    tiles: int
    chunks: int
    held: int
    norms: bool

    @property
    def warps(self) -> int:
        return self.tiles * _PARTS

    @property
    def head(self) -> int:
        """Rows of a cluster."""
        return self.blocks * self.tiles * _TILE_ROWS

    def smem_bytes(self, nope: int) -> int:
        chunks = self.chunks + self.held
        columns = (chunks + 1) * 64 + (chunks * 64 if self.norms else 0)
        up_warps = _LATENTS // self.blocks // _TILE_ROWS
        held = (self.warps * self.held + up_warps * (nope // 32)) * _CHUNK_BYTES
        return self.warps * (_TILE_BYTES + columns) + held + nope * 2


_SHAPES = {(768, 192): _Shape(8, 2, 6, 0, norms=True), (2048, 128): _Shape(4, 3, 8, 8, norms=False)}
"""By k and the part of a head's queries that goes to latents."""


def takes_absorb(
    kernels: Launcher, weight: torch.Tensor, key_up: torch.Tensor, tokens: int, *, head: int, norms: bool
) -> bool:
    """Whether `absorb` has a kernel for weight (rows, k) and key_up (heads, kv_lora, nope), and leaves `gemv`'s bits.

    head: rows of one. In a batch each token's blocks would read the weights again.
    """
    _heads, latents, nope = key_up.shape
    rows, k = weight.shape
    shape = _SHAPES.get((k, nope))
    if shape is None or not kernels.has_clusters or tokens != 1:
        return False
    warps, chunks, held = variant(rows, k, norms=norms)
    has_order = (warps, chunks + held) == (_PARTS, shape.chunks + shape.held)
    return has_order and (latents, head, norms) == (_LATENTS, shape.head, shape.norms)


def absorb(
    kernels: Launcher,
    weight: torch.Tensor,
    key_up: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    q_latent: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> None:
    """y = weight x, or weight RMSNorm(x); q_latent = key_up times the first part of each head's y, rounded to bf16.

    weight: (rows, k), as many heads as key_up has first. x: (1, k), y: (1, rows), q_latent: (1, heads, kv_lora), all
    bf16. The bits are those of two `gemv`.
    """
    heads, _latents, nope = key_up.shape
    rows, k = weight.shape
    shape = _SHAPES[(k, nope)]
    check("weight", weight, (rows, k), torch.bfloat16)
    check("key_up", key_up, (heads, _LATENTS, nope), torch.bfloat16)
    check("y", y, (1, rows), torch.bfloat16)
    check("q_latent", q_latent, (1, heads, _LATENTS), torch.bfloat16)
    if tuple(x.shape) != (1, k) or x.stride(1) != 1 or x.data_ptr() % 16:
        raise ValueError(f"x {tuple(x.shape)} with strides {x.stride()}; it must be one token of {k}, at 16 bytes")
    params = AbsorbParams(
        weight=address(weight),
        x=address(x),
        norm_weight=address(norm_weight),
        key_up=address(key_up),
        y=address(y),
        q_latent=address(q_latent),
        rows=rows,
        heads=heads,
        k=k,
        norm_eps=norm_eps,
    )
    kernels.launch(
        "gemv",
        f"absorb_k{k}_n{nope}",
        grid=(shape.blocks, ceil_div(rows, shape.head), 1),
        threads=shape.warps * 32,
        smem_bytes=shape.smem_bytes(nope),
        params=params,
    )
