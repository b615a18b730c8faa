"""Attention of a piece of a prompt over the paged cache: launches of `prefill_kernel`.

GQA reads keys and values in their frames. MLA first expands the latents it needs to keys and values of every head, in
rounds of a bounded number of keys: for many queries that is far fewer products than scoring latents would be.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crosspool.backends.cuda.attention import LOG2_E
from crosspool.backends.cuda.attention_weights import MLAWeights
from crosspool.backends.cuda.cache import PagedCache
from crosspool.backends.cuda.chunk_params import GatherSlotsParams
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.params import address
from crosspool.backends.cuda.prefill_blocks import Round
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import ceil_div

EXPANDED_KEYS = 8192
"""Latents that are expanded at once: GLM's take 168 MB."""

_WARPS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """How the kernel is cut for one shape, by measurement on an H200."""

    rows: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """A `Round` on the device. blocks: (count, FIELDS); key_table_rows, key_positions: (keys), empty for GQA."""

    blocks: torch.Tensor
    key_table_rows: torch.Tensor
    key_positions: torch.Tensor

    @classmethod
    def of(cls, part: Round, device: torch.device) -> "DeviceRound":
        arrays = (part.blocks, part.key_table_rows, part.key_positions)
        return cls(*(upload(torch.from_numpy(array), device) for array in arrays))


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` on the device, without waiting for what runs there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.clone()


def split_dim(size: int) -> tuple[int, int]:
    """`size` as a sum of two powers of two that the kernel multiplies (the second may be 0); ValueError elsewhere."""
    first = 1 << (size.bit_length() - 1)
    rest = size - first
    if first < 16 or (rest and (rest < 16 or rest & (rest - 1))):
        raise ValueError(f"heads of {size} elements; the prefill kernel takes sums of two powers of two from 16 on")
    return first, rest


def tile_of(spec: GQASpec | MLASpec) -> Tile:
    """The measured cut of a shape."""
    widest = spec.v_head_dim if isinstance(spec, MLASpec) else spec.head_dim
    return Tile() if widest <= 128 else Tile(stages=2)


def is_supported(spec: GQASpec | MLASpec) -> bool:
    """Whether the prefill kernel takes this shape; others run through the decode kernels."""
    try:
        split_dim(spec.qk_nope_head_dim if isinstance(spec, MLASpec) else spec.head_dim)
    except ValueError:
        return False
    rope = spec.qk_rope_head_dim if isinstance(spec, MLASpec) else 16
    return rope >= 16 and rope & (rope - 1) == 0


def gqa_attention(
    spec: GQASpec,
    q: torch.Tensor,
    cache: PagedCache,
    layer: int,
    part: DeviceRound,
    sinks: torch.Tensor | None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """(rows, heads, head_dim) from q (rows, heads, head_dim), normed and turned; the rows' own keys are in the cache.

    Cache and queries have one dtype, bfloat16 on a GPU. cache: its frame table holds the step's sequences.
    """
    geometry, dim = cache.geometry, spec.head_dim
    arena = cache.frames.view(q.dtype).flatten()
    keys = arena[geometry.offset_of_layer(layer) // q.element_size() :]
    table = cache.frame_table[:, :, geometry.frame_of_layer(layer) :]
    _launch(
        tile or tile_of(spec),
        spec,
        q,
        q,
        (keys, geometry.elements_per_token_layer, dim),
        (keys, 0),
        (keys[spec.num_kv_heads * dim :], geometry.elements_per_token_layer, dim),
        (table, geometry.frame_bytes // q.element_size(), geometry.page_tokens),
        part,
        sinks,
        out := torch.empty_like(q),
        None,
    )
    return out


def mla_attention(
    kernels: Launcher,
    spec: MLASpec,
    weights: MLAWeights,
    q: torch.Tensor,
    q_rope: torch.Tensor,
    cache: PagedCache,
    layer: int,
    rounds: Sequence[DeviceRound],
    tile: Tile | None = None,
) -> torch.Tensor:
    """(rows, heads, v_head_dim). q: (rows, heads, nope + rope) as projected; q_rope: (rows, heads, rope), turned."""
    tokens, heads, nope = q.shape[0], spec.num_heads, spec.qk_nope_head_dim
    out = torch.empty(tokens, heads, spec.v_head_dim, dtype=q.dtype, device=q.device)
    held = None
    if len(rounds) > 1:
        acc = torch.empty(tokens, heads, spec.v_head_dim, dtype=torch.float32, device=q.device)
        held = (acc, torch.empty(tokens, heads, 2, dtype=torch.float32, device=q.device))
    table = (cache.frame_table, 0, 0)
    for part in rounds:
        slots = gather_slots(kernels, cache, layer, part, q.dtype)
        latents = slots[:, : spec.kv_lora_rank].expand(heads, -1, -1)
        keys = torch.bmm(latents, weights.key_up)
        values = torch.bmm(latents, weights.value_up.transpose(1, 2))
        _launch(
            tile or tile_of(spec),
            spec,
            q[:, :, :nope],
            q_rope,
            (keys, keys.stride(1), keys.stride(0)),
            (slots[:, spec.kv_lora_rank :], slots.stride(0)),
            (values, values.stride(1), values.stride(0)),
            table,
            part,
            None,
            out,
            held,
        )
    return out


def gather_slots(
    kernels: Launcher, cache: PagedCache, layer: int, part: DeviceRound, dtype: torch.dtype
) -> torch.Tensor:
    """(keys, elements of a slot): the round's cache rows side by side."""
    geometry = cache.geometry
    slots = len(part.key_positions)
    out = torch.empty(slots, geometry.elements_per_token_layer, dtype=dtype, device=cache.frames.device)
    params = GatherSlotsParams(
        cache=cache.view(layer),
        table_rows=address(part.key_table_rows),
        positions=address(part.key_positions),
        out=address(out),
        slots=slots,
    )
    kernels.launch(
        "chunk_mla",
        "gather_slots",
        grid=(ceil_div(slots, _WARPS), 1, 1),
        threads=_WARPS * 32,
        smem_bytes=0,
        params=params,
        overlap=False,
    )
    return out


def _launch(
    tile: Tile,
    spec: GQASpec | MLASpec,
    q: torch.Tensor,
    q_rope: torch.Tensor,
    k: tuple[torch.Tensor, int, int],
    k_rope: tuple[torch.Tensor, int],
    v: tuple[torch.Tensor, int, int],
    table: tuple[torch.Tensor, int, int],
    part: DeviceRound,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    held: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """k, v: (tensor, elements between keys, between heads). table: (tensor, elements of a frame, tokens of a page)."""
    from crosspool.backends.cuda.prefill_kernel import prefill_attention

    d1, d2 = split_dim(q.shape[2])
    value_dim = out.shape[2]
    frame_table, frame_elements, page_tokens = table
    is_mla = isinstance(spec, MLASpec)
    acc, sums = held or (q, q)
    window = 0 if isinstance(spec, MLASpec) or spec.sliding_window is None else spec.sliding_window
    prefill_attention[(len(part.blocks), spec.num_heads)](
        q,
        q.stride(0),
        q.stride(1),
        q_rope,
        *k,
        *k_rope,
        *v,
        frame_table,
        frame_table.stride(0),
        frame_table.stride(1),
        frame_elements,
        part.blocks,
        q if sinks is None else sinks,
        out,
        acc,
        sums,
        spec.num_heads,
        spec.softmax_scale * LOG2_E,
        GROUP=1 if isinstance(spec, MLASpec) else spec.num_heads // spec.num_kv_heads,
        D1=d1,
        D2=d2,
        ROPE=spec.qk_rope_head_dim if isinstance(spec, MLASpec) else 0,
        DV=value_dim,
        DV_PADDED=max(16, 1 << (value_dim - 1).bit_length()),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        PAGE_TOKENS=0 if is_mla else page_tokens,
        WINDOW=window,
        HAS_SINKS=sinks is not None,
        CARRIES=held is not None,
        WIDE=os.environ.get("TRITON_INTERPRET") == "1",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
