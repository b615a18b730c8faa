"""Runs a model's chunk kernels once while it loads, so that no prompt waits for compilers and libraries.

Nothing is read or changed but frame 0, which belongs to nobody.
"""

from collections.abc import Sequence

import numpy as np
import torch

from crosspool.backends.cuda.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunk_half import ChunkHalf, ChunkRows
from crosspool.backends.cuda.chunk_plan import chunk_plan
from crosspool.backends.cuda.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.link import Site
from crosspool.backends.cuda.prefill_attention import span_sizes
from crosspool.backends.cuda.prefill_blocks import SPAN_SIZES
from crosspool.backends.cuda.sm_partition import PrefillStreams
from crosspool.backends.cuda.span_attention import SpanGraphs
from crosspool.backends.cuda.weights import AttentionWeights
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec


def warm_up_attention(
    kernels: Launcher, spec: ModelSpec, weights: AttentionWeights, arena: torch.Tensor, geometry: PageGeometry
) -> None:
    """Every shape of attention with and without spans, and the head."""
    shapes = {layer.attention: number for number, layer in reversed(list(enumerate(spec.layers)))}
    for rows, cached in (
        (SPAN_SIZES.rows[-1], sum(SPAN_SIZES.keys)),
        (SPAN_SIZES.rows[0], sum(SPAN_SIZES.keys)),
        (64, 0),
    ):
        table = np.zeros((geometry.frames_per_page, geometry.num_pages(cached + rows)), dtype=np.int64)
        batch = ChunkRows(
            token_ids=np.zeros(rows, dtype=np.int64),
            positions=np.arange(cached, cached + rows),
            row_of_token=np.zeros(rows, dtype=np.int64),
            tables=[table],
        )
        plan = chunk_plan(rows, 1, spec.num_layers, rows)
        half = ChunkHalf(kernels, spec, weights, arena, geometry, batch, plan)
        half.embed()
        for number in shapes.values():
            half.attend(number, plan.pieces[0])
        half.logits([rows - 1])


def capture_spans(site: Site, spec: ModelSpec) -> dict[GQASpec | MLASpec, SpanGraphs]:
    """Graphs of every shape whose spans the library runs."""
    if site.device.type != "cuda":
        return {}
    streams = PrefillStreams(site.driver, site.device, site.partition).by_share
    shapes = {layer.attention for layer in spec.layers}
    sizes = {shape: span_sizes(shape, site.device) for shape in shapes}
    return {
        shape: SpanGraphs.capture(shape, sizes[shape], site.device, streams) for shape in shapes if sizes[shape].keys
    }


def warm_up_ffn(kernels: Launcher, layers: Sequence[FFNLayerWeights], routers: Sequence[torch.Tensor | None]) -> None:
    """One layer of every kind."""
    ffn = ChunkFFN(kernels, layers, routers)
    kinds = {layer.spec: number for number, layer in enumerate(layers)}
    for number in kinds.values():
        weights = layers[number]
        held = weights.shared_down if weights.down is None else weights.down
        assert held is not None
        for rows in (64, SPAN_SIZES.rows[-1]):
            x = torch.randn(rows, weights.hidden, device=held.device).bfloat16()
            ffn.run(number, x, torch.empty(rows, weights.hidden, device=held.device))
