"""Attention of a piece of a prompt over the paged cache.

GQA's keys and values are read in their frames, or side by side for a library's kernel. MLA first expands the latents
it needs to keys and values of every head, a bounded number at once: for many queries that is far fewer products than
scoring latents would be.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from crosspool.backends.cuda.attention import LOG2_E
from crosspool.backends.cuda.attention_weights import MLAWeights
from crosspool.backends.cuda.cache import PagedCache
from crosspool.backends.cuda.chunk_params import GatherSlotsParams, MergePartParams
from crosspool.backends.cuda.chunk_plan import padded_rows
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.params import address
from crosspool.backends.cuda.prefill_blocks import NO_SPANS, SPAN_SIZES, Round, Span, SpanSizes
from crosspool.backends.cuda.span_attention import Part, SpanGraphs, full_attention
from crosspool.backends.cuda.uploads import upload_all
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import ceil_div

EXPANDED_KEYS = 8192
"""Latents that are expanded at once: GLM's take 168 MB."""

_WARPS = 4
_Rows = tuple[torch.Tensor, int, int]
"""A tensor, and the elements between two tokens and between two heads of it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How the kernel is cut for one shape, by measurement on an H200."""

    rows: int = 128
    keys: int = 128
    warps: int = 8
    stages: int = 2


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """A `Round` on the device. blocks: (count, FIELDS); key_table_rows, key_positions: (keys), empty for GQA."""

    blocks: torch.Tensor
    key_table_rows: torch.Tensor
    key_positions: torch.Tensor

    @classmethod
    def of(cls, part: Round, device: torch.device) -> "DeviceRound":
        return cls(*upload_all([part.blocks, part.key_table_rows, part.key_positions], device))


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """A `Span` with its keys' places on the device."""

    span: Span
    key_table_rows: torch.Tensor
    key_positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class PieceAttention:
    """What a piece's attention is made of."""

    spans: tuple[DeviceSpan, ...]
    rounds: tuple[DeviceRound, ...]

    @property
    def carries(self) -> bool:
        """Whether softmax sums are held between its launches."""
        return bool(self.spans) or len(self.rounds) > 1


class Library:
    """How a chunk's spans run: by the model's captured graphs, where it holds them, or by calls."""

    def __init__(self, graphs: SpanGraphs | None = None, is_shared: Callable[[], bool] = lambda: False) -> None:
        """is_shared: whether torch's current stream is the partition's."""
        self._graphs, self._is_shared = graphs, is_shared

    def queries(self, rows: int) -> torch.Tensor | None:
        """Where the queries of a piece of one sequence may lie, so that its spans find them."""
        return None if self._graphs is None or rows > len(self._graphs.buffers.q) else self._graphs.buffers.q

    def slots(self, span: Span) -> torch.Tensor | None:
        """Room for a span's cache rows."""
        return self._graphs.buffers.slots[: span.count] if self._graphs and self._takes(span) else None

    def keys_and_values(self, span: Span) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Room for a span's expanded keys and values."""
        if self._graphs is None or not self._takes(span):
            return None
        held = self._graphs.buffers
        return held.keys[:, : span.count], held.values[:, : span.count]

    def run(
        self, spec: GQASpec | MLASpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span
    ) -> Part:
        """Attention of the span's rows of q (rows, heads, D) to its keys (kv_heads, count, D), in the room for them."""
        if self._graphs is not None and self._takes(span):
            return self._graphs.replay(span.rows, span.count, self._is_shared())
        first = span.stretch.first_row
        return full_attention(q[first : first + span.rows], keys, values, spec.softmax_scale)

    def _takes(self, span: Span) -> bool:
        """The graphs' queries begin at the piece's first row."""
        return span.stretch.first_row == 0


def split_dim(size: int) -> tuple[int, int]:
    """`size` as a sum of two powers of two that the kernel multiplies (the second may be 0); ValueError elsewhere."""
    first = 1 << (size.bit_length() - 1)
    rest = size - first
    if first < 16 or (rest and (rest < 16 or rest & (rest - 1))):
        raise ValueError(f"heads of {size} elements; the prefill kernel takes sums of two powers of two from 16 on")
    return first, rest


def key_dim(spec: GQASpec | MLASpec) -> int:
    return spec.qk_head_dim if isinstance(spec, MLASpec) else spec.head_dim


def is_supported(spec: GQASpec | MLASpec) -> bool:
    """Whether the prefill kernel takes this shape; others run through the decode kernels."""
    try:
        split_dim(key_dim(spec))
    except ValueError:
        return False
    return not isinstance(spec, MLASpec) or spec.qk_nope_head_dim % 8 == 0


def tile_of(spec: GQASpec | MLASpec) -> Tile:
    """The measured cut of a shape."""
    widest = max(key_dim(spec), spec.v_head_dim) if isinstance(spec, MLASpec) else spec.head_dim
    return Tile() if widest <= 128 else Tile(keys=64)


def span_sizes(spec: GQASpec | MLASpec, device: torch.device) -> SpanSizes:
    """The library's sizes where it has a fast kernel for the shape; on an H200 it is 1.7 times as fast as ours."""
    if isinstance(spec, GQASpec) and (spec.sinks or spec.sliding_window is not None):
        return NO_SPANS
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return SPAN_SIZES if is_hopper and key_dim(spec) <= 256 and key_dim(spec) % 8 == 0 else NO_SPANS


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
    held = _held(q, tokens, spec.num_heads, dim) if piece.carries else None
    for span in piece.spans:
        assert held is not None
        room = library.slots(span.span)
        slots = gather_slots(kernels, cache, layer, span.key_table_rows, span.key_positions, q.dtype, room)
        pair = slots.unflatten(1, (2, spec.num_kv_heads, dim)).permute(1, 2, 0, 3)
        _merge(kernels, library.run(spec, q, pair[0], pair[1], span.span), span.span, held)
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
    held = _held(q, tokens, heads, spec.v_head_dim) if piece.carries else None
    for span in piece.spans:
        assert held is not None
        room = library.slots(span.span)
        slots = gather_slots(kernels, cache, layer, span.key_table_rows, span.key_positions, q.dtype, room)
        keys, values = expand(spec, weights, slots, library.keys_and_values(span.span))
        _merge(kernels, library.run(spec, q, keys, values, span.span), span.span, held)
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


def expand(
    spec: MLASpec,
    weights: MLAWeights,
    slots: torch.Tensor,
    room: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (heads, count, nope + rope) and values (heads, count, v) of cache rows (count, latent + rope), in `room`."""
    heads, nope = spec.num_heads, spec.qk_nope_head_dim
    latents = slots[:, : spec.kv_lora_rank].expand(heads, -1, -1)
    keys, values = room or (
        torch.empty(heads, len(slots), width, dtype=slots.dtype, device=slots.device)
        for width in (spec.qk_head_dim, spec.v_head_dim)
    )
    torch.bmm(latents, weights.key_up, out=keys[:, :, :nope])
    keys[:, :, nope:] = slots[:, spec.kv_lora_rank :]
    torch.bmm(latents, weights.value_up.transpose(1, 2), out=values)
    return keys, values


def gather_slots(
    kernels: Launcher,
    cache: PagedCache,
    layer: int,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    dtype: torch.dtype,
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """(keys, elements of a slot): cache rows side by side, in `room` where that is given."""
    geometry = cache.geometry
    slots = len(positions)
    width = geometry.elements_per_token_layer
    out = torch.empty(slots, width, dtype=dtype, device=cache.frames.device) if room is None else room
    params = GatherSlotsParams(
        cache=cache.view(layer),
        table_rows=address(table_rows),
        positions=address(positions),
        out=address(out),
        slots=slots,
    )
    kernels.launch(
        "chunk_attention",
        "gather_slots",
        grid=(ceil_div(slots, _WARPS), 1, 1),
        threads=_WARPS * 32,
        smem_bytes=0,
        params=params,
        overlap=False,
    )
    return out


def _held(q: torch.Tensor, tokens: int, heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unnormalised outputs (tokens, heads, width) and (maximum, sum) of softmax (tokens, heads, 2)."""
    acc = torch.empty(tokens, heads, width, dtype=torch.float32, device=q.device)
    return acc, torch.empty(tokens, heads, 2, dtype=torch.float32, device=q.device)


def _merge(kernels: Launcher, part: Part, span: Span, held: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Take a span's attention into what is held for its stretch's rows."""
    out, log_sums = part
    acc, sums = (tensor[span.stretch.first_row :] for tensor in held)
    rows, heads, width = span.stretch.num_rows, acc.shape[1], acc.shape[2]
    params = MergePartParams(
        part=address(out),
        log_sums=address(log_sums),
        acc=address(acc),
        sums=address(sums),
        row_stride=out.stride(0),
        head_stride=out.stride(1),
        log_sums_stride=log_sums.stride(0),
        rows=rows,
        heads=heads,
        width=width,
        is_first=span.first == 0,
    )
    kernels.launch(
        "chunk_attention",
        "merge_part",
        grid=(ceil_div(rows * heads, _WARPS), 1, 1),
        threads=_WARPS * 32,
        smem_bytes=0,
        params=params,
        overlap=False,
    )


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
    from crosspool.backends.cuda.prefill_kernel import prefill_attention

    d1, d2 = split_dim(q.shape[2])
    value_dim = out.shape[2]
    acc, sums = held or (q, q)
    window = 0 if isinstance(spec, MLASpec) or spec.sliding_window is None else spec.sliding_window
    prefill_attention[(len(part.blocks), spec.num_heads)](
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
        GROUP=1 if isinstance(spec, MLASpec) else spec.num_heads // spec.num_kv_heads,
        D1=d1,
        D2=d2,
        DV=value_dim,
        DV_PADDED=max(16, 1 << (value_dim - 1).bit_length()),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        PAGE_TOKENS=page_tokens,
        WINDOW=window,
        HAS_SINKS=sinks is not None,
        CARRIES=held is not None,
        WIDE=os.environ.get("TRITON_INTERPRET") == "1",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def span_rows(tokens: int, spans: Sequence[Span]) -> int:
    """Rows that a piece's queries need: its tokens, and what the spans compute behind them."""
    return max([tokens, *(span.stretch.first_row + span.rows for span in spans)])
