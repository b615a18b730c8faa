"""Attention of a piece of a prompt over the paged cache.

GQA's keys and values are read in their frames, or side by side for a library's kernel. MLA first expands the latents
it needs to keys and values of every head, a bounded number at once: for many queries that is far fewer products than
scoring latents would be.
"""

import os
from functools import cache

import torch

from crosspool.backends.cuda.chunks.chunk_plan import padded_rows
from crosspool.backends.cuda.chunks.prefill_piece import DeviceRound, Library, PieceAttention
from crosspool.backends.cuda.chunks.prefill_slots import expand, gather_slots, held_sums, merge_span
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.attention import LOG2_E
from crosspool.backends.cuda.kernels.prefill_shapes import Tile, split_dim, tile_of
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.loading.attention_weights import MLAWeights
from crosspool.models.spec import GQASpec, MLASpec

_Rows = tuple[torch.Tensor, int, int]
"""A tensor, and the elements between two tokens and between two heads of it."""


def gqa_attention(
    kernels: Launcher,
    spec: GQASpec,
    q: torch.Tensor,
    tokens: int,
    cache: PagedCache,
    layer: int,
    piece: PieceAttention,
    sinks: torch.Tensor | None,
    library: Library,
    tile: Tile | None = None,
) -> torch.Tensor:
    """(padded tokens, heads, head_dim) from q (rows >= tokens, heads, head_dim), normed and turned; own keys cached.

    Cache and queries have one dtype, bfloat16 on a GPU. cache: its frame table holds the step's sequences. q has as
    many rows as the largest span needs behind its stretch's first.
    """
    geometry, dim = cache.geometry, spec.head_dim
    held = held_sums(q, tokens, spec.num_heads, dim) if piece.carries else None
    for span in piece.spans:
        assert held is not None
        room = library.slots(span.span)
        slots = gather_slots(kernels, cache, layer, span.key_table_rows, span.key_positions, q.dtype, room)
        pair = slots.unflatten(1, (2, spec.num_kv_heads, dim)).permute(1, 2, 0, 3)
        merge_span(kernels, library.run(spec, q, pair[0], pair[1], span.span), span.span, held)
    arena = cache.frames.view(q.dtype).flatten()
    keys = arena[geometry.offset_of_layer(layer) // q.element_size() :]
    stride = geometry.elements_per_token_layer
    out = torch.empty(padded_rows(tokens), spec.num_heads, dim, dtype=q.dtype, device=q.device)
    (part,) = piece.rounds
    _launch(
        tile or tile_of(spec),
        spec,
        q,
        (keys, stride, dim),
        (keys[spec.num_kv_heads * dim :], stride, dim),
        cache.frame_table[:, :, geometry.frame_of_layer(layer) :],
        geometry.frame_bytes // q.element_size(),
        geometry.page_tokens,
        part,
        sinks,
        out,
        held,
    )
    return out


def mla_attention(
    kernels: Launcher,
    spec: MLASpec,
    weights: MLAWeights,
    q: torch.Tensor,
    tokens: int,
    cache: PagedCache,
    layer: int,
    piece: PieceAttention,
    library: Library,
    tile: Tile | None = None,
) -> torch.Tensor:
    """(padded tokens, heads, v_head_dim) from q (rows >= tokens, heads, nope + rope), the rope part turned."""
    heads = spec.num_heads
    out = torch.empty(padded_rows(tokens), heads, spec.v_head_dim, dtype=q.dtype, device=q.device)
    held = held_sums(q, tokens, heads, spec.v_head_dim) if piece.carries else None
    for span in piece.spans:
        assert held is not None
        room = library.slots(span.span)
        slots = gather_slots(kernels, cache, layer, span.key_table_rows, span.key_positions, q.dtype, room)
        keys, values = expand(spec, weights, slots, library.keys_and_values(span.span))
        merge_span(kernels, library.run(spec, q, keys, values, span.span), span.span, held)
    for part in piece.rounds:
        slots = gather_slots(kernels, cache, layer, part.key_table_rows, part.key_positions, q.dtype)
        keys, values = expand(spec, weights, slots)
        _launch(
            tile or tile_of(spec),
            spec,
            q,
            (keys, keys.stride(1), keys.stride(0)),
            (values, values.stride(1), values.stride(0)),
            cache.frame_table,
            0,
            0,
            part,
            None,
            out,
            held,
        )
    return out


def _launch(
    tile: Tile,
    spec: GQASpec | MLASpec,
    q: torch.Tensor,
    k: _Rows,
    v: _Rows,
    frame_table: torch.Tensor,
    frame_elements: int,
    page_tokens: int,
    part: DeviceRound,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    held: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    from crosspool.backends.cuda.kernels.prefill_kernel import launch_prefill

    acc, sums = held or (q, q)
    arguments = (
        q,
        q.stride(0),
        q.stride(1),
        *k,
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
    )
    group = 1 if isinstance(spec, MLASpec) else spec.num_heads // spec.num_kv_heads
    window = 0 if isinstance(spec, MLASpec) or spec.sliding_window is None else spec.sliding_window
    constants = _constants(
        tile, group, q.shape[2], out.shape[2], page_tokens, window, sinks is not None, held is not None
    )
    launch_prefill((len(part.blocks), spec.num_heads, 1), arguments, constants)


@cache
def _constants(
    tile: Tile,
    group: int,
    key_dim: int,
    value_dim: int,
    page_tokens: int,
    window: int,
    has_sinks: bool,
    carries: bool,
) -> dict[str, object]:
    """What the kernel is compiled for."""
    d1, d2 = split_dim(key_dim)
    return {
        "GROUP": group,
        "D1": d1,
        "D2": d2,
        "DV": value_dim,
        "DV_PADDED": max(16, 1 << (value_dim - 1).bit_length()),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "PAGE_TOKENS": page_tokens,
        "WINDOW": window,
        "HAS_SINKS": has_sinks,
        "CARRIES": carries,
        "WIDE": os.environ.get("TRITON_INTERPRET") == "1",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
