"""Runs a model's chunk kernels in every size while it loads.

What a step meets for the first time (a kernel to load, memory to allocate, a plan to make) may wait for the device, and
so for other lanes' peers; see `uploads.py`. Nothing is read or changed but frame 0, which has to belong to nobody.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_plan import PADDED_ROWS, chunk_plan
from crosspool.backends.cuda.chunks.chunk_rows import ChunkRows
from crosspool.backends.cuda.chunks.prefill_blocks import KEY_SIZES, SPAN_SIZES
from crosspool.backends.cuda.chunks.prefill_slots import expand
from crosspool.backends.cuda.chunks.span_attention import SpanGraphs
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.prefill_shapes import EXPANDED_KEYS, span_sizes
from crosspool.backends.cuda.loading.attention_weights import MLAWeights
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec

SAMPLED = ([0], [0] * 17)
"""Rows that are picked at a chunk's end: torch has a kernel for up to 16 of them, and one for more."""


def warm_up_attention(
    kernels: Launcher,
    spec: ModelSpec,
    weights: AttentionWeights,
    arena: torch.Tensor,
    geometry: PageGeometry,
    streams: Iterable[Any],
) -> None:
    """Every shape of attention in every size, with and without keys far before, and what becomes of the last rows."""
    shapes = {layer.attention: number for number, layer in reversed(list(enumerate(spec.layers)))}
    cases = [(rows, 0) for rows in reversed(PADDED_ROWS)] + [(SPAN_SIZES.rows[0], SPAN_SIZES.keys[-1])]
    for stream in streams:
        with torch.cuda.stream(stream):
            for rows, cached in cases:
                half = ChunkHalf(
                    kernels,
                    spec,
                    weights,
                    arena,
                    geometry,
                    _rows_of(rows, cached, geometry),
                    plan := chunk_plan(rows, 1, spec.num_layers, rows),
                )
                half.embed()
                for number in shapes.values():
                    half.attend(number, plan.pieces[0])
            for tokens in SAMPLED:
                half.logits(tokens)
                half.rows(tokens)  # what a prefill rank gives to the home instead
            for shape, number in shapes.items():
                attention = weights.layers[number].attention
                if isinstance(shape, MLASpec) and isinstance(attention, MLAWeights):
                    _expand_all(shape, attention, arena.device)
        stream.synchronize()


def capture_spans(
    spec: ModelSpec, device: torch.device, streams: Mapping[bool, Any]
) -> dict[GQASpec | MLASpec, SpanGraphs]:
    """Graphs of every shape whose spans the library runs. streams: `PrefillStreams.by_share`."""
    sizes = {shape: span_sizes(shape, device) for shape in spec.shapes}
    return {shape: SpanGraphs.capture(shape, own, device, streams) for shape, own in sizes.items() if own.keys}


def warm_up_ffn(
    kernels: Launcher,
    layers: Sequence[FFNLayerWeights],
    routers: Sequence[torch.Tensor | None],
    streams: Iterable[Any],
) -> None:
    """One layer of every kind, in every size."""
    kinds = {layer.spec: number for number, layer in enumerate(layers)}
    for stream in streams:
        with torch.cuda.stream(stream):
            ffn = ChunkFFN(kernels, layers, routers)
            for number in kinds.values():
                for rows in reversed(PADDED_ROWS):
                    x = torch.ones(rows, layers[number].hidden, dtype=torch.bfloat16, device=ffn.device)
                    ffn.run(number, x, torch.empty(rows, layers[number].hidden, device=ffn.device))
        stream.synchronize()


def _rows_of(rows: int, cached: int, geometry: PageGeometry) -> ChunkRows:
    """A sequence whose pages are all frame 0."""
    return ChunkRows(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.arange(cached, cached + rows),
        row_of_token=np.zeros(rows, dtype=np.int64),
        tables=[np.zeros((geometry.frames_per_page, geometry.num_pages(cached + rows)), dtype=np.int64)],
    )


def _expand_all(spec: MLASpec, weights: MLAWeights, device: torch.device) -> None:
    slots = torch.zeros(EXPANDED_KEYS, spec.kv_elements_per_token, dtype=torch.bfloat16, device=device)
    for count in (*range(EXPANDED_KEYS, KEY_SIZES[-1], -KEY_SIZES[-1]), *KEY_SIZES):
        expand(spec, weights, slots[:count])
