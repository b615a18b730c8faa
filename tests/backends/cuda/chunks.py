"""Both halves of a model run a chunk's pieces on one device, with no pool between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_plan import chunk_plan
from crosspool.backends.cuda.chunks.chunk_rows import ChunkRows
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.directory import ModelDirectory
from crosspool.weights_pool.loader import load_attention_weights, load_ffn_weights
from tests.backends.cuda.decoding import FRAME_BYTES
from tests.backends.cuda.numpy_weights import attention_weights_from_numpy, ffn_weights_from_numpy


class ChunkModel:
    """A model that prefills; `room` tokens for each of `rows` sequences, their frames in random order."""

    def __init__(
        self, kernels, directory: ModelDirectory, rows: int, room: int, device, *, num_slices=1, page_tokens=8, seed=0
    ) -> None:
        self.kernels, self.spec, self.device = kernels, directory.spec, device
        self.geometry = page_geometry(self.spec, page_tokens=page_tokens, frame_bytes=FRAME_BYTES, kv_dtype="bfloat16")
        pages = self.geometry.num_pages(room)
        frames = rows * pages * self.geometry.frames_per_page
        order = np.random.default_rng(seed).permutation(frames) + 1
        self.tables = list(order.reshape(rows, self.geometry.frames_per_page, pages).astype(np.int64))
        self.arena = torch.full((frames + 1, FRAME_BYTES), 0xFF, dtype=torch.uint8, device=device)  # NaN
        self.attention = attention_weights_from_numpy(self.spec, load_attention_weights(directory), device)
        self.ffn = [
            ChunkFFN(kernels, ffn_weights_from_numpy(self.spec, load_ffn_weights(directory, idx, num_slices), device))
            for idx in range(num_slices)
        ]

    def batch(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> ChunkRows:
        """A step's rows: (sequence, tokens cached before, tokens to run)."""
        counts = [len(tokens) for _, _, tokens in parts]
        return ChunkRows(
            token_ids=np.concatenate([np.array(tokens, dtype=np.int64) for _, _, tokens in parts]),
            positions=np.concatenate(
                [np.arange(cached, cached + count) for (_, cached, _), count in zip(parts, counts, strict=True)]
            ),
            row_of_token=np.repeat(np.arange(len(parts)), counts),
            tables=[self.tables[sequence] for sequence, _, _ in parts],
        )

    def run(self, parts: Sequence[tuple[int, int, Sequence[int]]], piece_tokens: int, sizes=None):
        """(residual stream after each layer, logits of each row's last token) of one step, on the CPU."""
        batch = self.batch(parts)
        tokens = len(batch.token_ids)
        plan = chunk_plan(tokens, 1, self.spec.num_layers, piece_tokens)
        half = ChunkHalf(self.kernels, self.spec, self.attention, self.arena, self.geometry, batch, plan, sizes)
        half.embed()
        hidden = []
        for layer in range(self.spec.num_layers):
            for piece in plan.pieces:
                rows = half.attend(layer, piece)
                partials = [
                    torch.full(rows.shape, float("nan"), dtype=torch.float32, device=self.device) for _ in self.ffn
                ]
                for ffn, partial in zip(self.ffn, partials, strict=True):
                    ffn.run(layer, rows, partial)
                half.add(layer, piece, partials)
            hidden.append(half.residual.cpu().clone())
        ends = np.cumsum([len(run) for _, _, run in parts]) - 1
        return hidden, half.logits(ends.tolist()).cpu()
