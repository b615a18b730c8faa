"""The KV pool's half of a chunk of prompts, layer by layer and piece by piece; it knows no peer.

half = ChunkHalf(kernels, spec, weights, arena, geometry, batch, plan)
half.embed()
for layer in range(num_layers):
    for piece in plan.pieces:
        rows = half.attend(layer, piece)       # what the FFN ranks get
        half.add(layer, piece, partials)       # what they gave back
logits = half.logits(tokens)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from crosspool.backends.cuda.channels.channel_map import Rows
from crosspool.backends.cuda.chunks.chunk_part import ChunkPart
from crosspool.backends.cuda.chunks.chunk_plan import PADDED_ROWS, ChunkPlan, Piece, padded_rows
from crosspool.backends.cuda.chunks.chunk_rows import ChunkRows, frame_tables, plan_attention
from crosspool.backends.cuda.chunks.prefill_attention import gqa_attention, mla_attention
from crosspool.backends.cuda.chunks.prefill_blocks import SpanSizes
from crosspool.backends.cuda.chunks.prefill_piece import Library, PieceAttention
from crosspool.backends.cuda.chunks.row_launch import launch_rows
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.uploads import upload_all
from crosspool.backends.cuda.kernels.chunk_params import MlaChunkParams, NormRowsParams
from crosspool.backends.cuda.kernels.gemv import MAX_TOKENS as HEAD_ROWS
from crosspool.backends.cuda.kernels.gemv import gemv
from crosspool.backends.cuda.kernels.norm import residual_norm
from crosspool.backends.cuda.kernels.params import MlaInput, address
from crosspool.backends.cuda.kernels.products import linear
from crosspool.backends.cuda.kernels.rope import RopeTable, gqa_input, rope_cache
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.loading.attention_weights import AttentionLayerWeights, GQAWeights, MLAWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec
from crosspool.units import ceil_div

_WARPS = 4


def head_logits(kernels: Launcher, head: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """(rows, vocabulary) fp32 logits of (rows, hidden) bf16, enqueued on torch's current stream."""
    out = torch.empty(len(normed), len(head), dtype=torch.float32, device=normed.device)
    for first in range(0, len(normed), HEAD_ROWS):
        part = slice(first, first + HEAD_ROWS)
        gemv(kernels, head, normed[part], out[part], overlap=False)
    return out


class PieceRows(NamedTuple):
    """What layers read and write of a piece's rows, made once a step.

    residual: (tokens, hidden) fp32. normed: (tokens, hidden) bf16. padded: the same, and what lies behind them.
    """

    residual: torch.Tensor
    normed: torch.Tensor
    padded: torch.Tensor


class ChunkHalf:
    """One step's rows on one device. Everything is enqueued on torch's current stream; nothing waits for it.

    cache: where the step's sequences have their slots. residual: (tokens, hidden) fp32.
    """

    def __init__(
        self,
        kernels: Launcher,
        spec: ModelSpec,
        weights: AttentionWeights,
        arena: torch.Tensor,
        geometry: PageGeometry,
        batch: ChunkRows,
        plan: ChunkPlan,
        sizes: SpanSizes | None = None,
        libraries: Mapping[GQASpec | MLASpec, Library] | None = None,
    ) -> None:
        """sizes: of the library's spans; None: those of the device. libraries: how a shape's spans run, if captured.

        geometry: of one layer alone where the cache serves all layers in turn.
        """
        self._has_one_layer = geometry.num_layers == 1
        self._kernels, self.spec, self._weights = kernels, spec, weights
        device, tokens = arena.device, len(batch.token_ids)
        self._device = device
        ints = np.stack([batch.token_ids, batch.positions, batch.row_of_token]).astype(np.int32)
        planned = plan_attention(spec, batch, plan, geometry, sizes, device)
        arrays = [ints, frame_tables(batch), *(array for piece in planned for array in piece.arrays)]
        (self._token_ids, self._positions, self._table_rows), tables, *held = upload_all(arrays, device)
        self.cache = PagedCache(frames=arena, frame_table=tables, geometry=geometry)
        self._ropes = {rope: RopeTable.allocate(rope, tokens, device) for rope in {shape.rope for shape in spec.shapes}}
        on_device = iter(held)
        parts = [
            self._part(piece, part.with_arrays(on_device), (libraries or {}).get(part.spec) or Library(), part.spec)
            for part, piece in zip(planned, plan.pieces * len(spec.shapes), strict=True)
        ]
        count = len(plan.pieces)
        self._parts = [parts[place * count : (place + 1) * count] for place in spec.shape_of_layer]  # by layer
        self.residual = torch.empty(tokens, spec.hidden_size, dtype=torch.float32, device=device)
        rows = tokens + PADDED_ROWS[-1]  # products of the last piece may run over its end
        self._normed = torch.empty(rows, spec.hidden_size, dtype=torch.bfloat16, device=device)
        self._rows = [self._piece_rows(piece) for piece in plan.pieces]

    def embed(self) -> None:
        """Residual stream of every row, normed for the first layer, and all rows' angles."""
        residual_norm(
            self._kernels,
            self.residual,
            self._weights.layers[0].input_norm,
            self._normed[: len(self.residual)],
            eps=self.spec.norm_eps,
            token_ids=self._token_ids,
            embed=self._weights.embed,
            overlap=False,
        )
        for rope in self._ropes.values():
            rope.update(self._kernels, self._positions, overlap=False)

    def attend(self, layer: int, piece: Piece) -> torch.Tensor:
        """Attention of one layer onto the residual stream; returns the FFN's rows, normed: (tokens, hidden) bf16."""
        weights = self._weights.layers[layer]
        if isinstance(weights.attention, GQAWeights):
            attended = self._gqa(layer, piece, weights, weights.attention)
        else:
            attended = self._mla(layer, piece, weights, weights.attention)
        out = linear(attended.flatten(1), weights.attention.o, weights.attention.o_bias)
        self._norm(piece, weights.post_attention_norm, [out[: piece.num_tokens]])
        return self._rows[piece.index].normed

    def add(self, layer: int, piece: Piece, partials: Sequence[Rows | torch.Tensor]) -> None:
        """Add the FFN's partial sums (tokens, hidden) fp32 in rank order, and norm for the next layer or the head."""
        layers = self._weights.layers
        norm = layers[layer + 1].input_norm if layer + 1 < len(layers) else self._weights.final_norm
        self._norm(piece, norm, partials)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """(len(tokens), vocabulary) fp32 logits of these tokens of the step, after the last `add`."""
        (index,) = upload_all([np.array(tokens, dtype=np.int32)], self._device)
        return head_logits(self._kernels, self._weights.head, self._normed.index_select(0, index))

    def rows(self, tokens: Sequence[int]) -> torch.Tensor:
        """(len(tokens), hidden) fp32: the residual stream of these tokens of the step."""
        (index,) = upload_all([np.array(tokens, dtype=np.int32)], self._device)
        return self.residual.index_select(0, index)

    def _norm(self, piece: Piece, norm: torch.Tensor, partials: Sequence[Rows | torch.Tensor]) -> None:
        rows = self._rows[piece.index]
        residual_norm(
            self._kernels,
            rows.residual,
            norm,
            rows.normed,
            eps=self.spec.norm_eps,
            partials=partials,
            overlap=False,
        )

    def _cached(self, layer: int) -> int:
        """The layer of the cache that holds this one."""
        return 0 if self._has_one_layer else layer

    def _piece_rows(self, piece: Piece) -> PieceRows:
        own, padded = slice(piece.start, piece.stop), slice(piece.start, piece.start + padded_rows(piece.num_tokens))
        return PieceRows(self.residual[own], self._normed[own], self._normed[padded])

    def _part(self, piece: Piece, attention: PieceAttention, library: Library, spec: GQASpec | MLASpec) -> ChunkPart:
        rows, whole = slice(piece.start, piece.stop), self._ropes[spec.rope]
        rope = replace(whole, cos_sin=whole.cos_sin[rows])
        return ChunkPart.of(spec, rope, self._positions[rows], self._table_rows[rows], attention, library)

    def _gqa(self, layer: int, piece: Piece, weights: AttentionLayerWeights, attention: GQAWeights) -> torch.Tensor:
        spec, part = weights.spec, self._parts[layer][piece.index]
        assert isinstance(spec, GQASpec)
        qkv = linear(self.padded(piece), attention.qkv, attention.qkv_bias)
        inputs = gqa_input(
            spec,
            part.rope,
            qkv,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            eps=self.spec.norm_eps,
        )
        q = part.queries()
        rope_cache(
            self._kernels,
            spec,
            inputs,
            self.cache,
            self._cached(layer),
            part.positions,
            q[: piece.num_tokens],
            table_rows=part.table_rows,
        )
        return gqa_attention(
            self._kernels,
            spec,
            q,
            piece.num_tokens,
            self.cache,
            self._cached(layer),
            part.attention,
            attention.sinks,
            part.library,
        )

    def _mla(self, layer: int, piece: Piece, weights: AttentionLayerWeights, attention: MLAWeights) -> torch.Tensor:
        spec, part, tokens = weights.spec, self._parts[layer][piece.index], piece.num_tokens
        assert isinstance(spec, MLASpec)
        down = linear(self.padded(piece), attention.down, attention.down_bias)
        first = down.shape[1] - spec.kv_elements_per_token
        q = down[:, :first]
        if attention.q_b is not None:
            assert attention.q_a_norm is not None
            q = linear(self._norm_rows(q, tokens, attention.q_a_norm, spec.lora_norm_eps), attention.q_b)
        kv_a = down[:, first:]
        queries = part.queries()
        params = MlaChunkParams(
            input=MlaInput(
                q=address(q),
                kv_a=address(kv_a),
                kv_a_norm=address(attention.kv_a_norm),
                rope=part.rope.view(),
                q_stride=q.stride(0),
                kv_a_stride=kv_a.stride(0),
                heads=spec.num_heads,
                latent=spec.kv_lora_rank,
                nope=spec.qk_nope_head_dim,
                eps=spec.lora_norm_eps,
            ),
            positions=address(part.positions),
            table_rows=address(part.table_rows),
            q=address(queries),
            cache=self.cache.view(self._cached(layer)),
        )
        self._kernels.launch(
            "chunk_attention",
            "mla_chunk",
            grid=(tokens, ceil_div(spec.num_heads + 2, _WARPS), 1),
            threads=_WARPS * 32,
            smem_bytes=_WARPS * max(spec.kv_lora_rank, spec.qk_rope_head_dim) * 4,
            params=params,
            overlap=False,
        )
        return mla_attention(
            self._kernels,
            spec,
            attention,
            queries,
            tokens,
            self.cache,
            self._cached(layer),
            part.attention,
            part.library,
        )

    def padded(self, piece: Piece) -> torch.Tensor:
        """A piece's normed rows, and what lies behind them."""
        return self._rows[piece.index].padded

    def _norm_rows(self, x: torch.Tensor, rows: int, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """(padded rows, width) bf16: RMSNorm of the first `rows` of x (padded rows, width), strided."""
        width = x.shape[1]
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=self._device)
        params = NormRowsParams(
            x=address(x),
            norm_weight=address(weight),
            out=address(out),
            stride=x.stride(0),
            width=width,
            rows=rows,
            eps=eps,
        )
        launch_rows(self._kernels, "norm_rows", rows, params)
        return out
