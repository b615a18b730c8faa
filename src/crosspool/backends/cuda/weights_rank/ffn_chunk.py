"""A chunk of prompts on a weights rank: each layer's FFN piece by piece."""

from collections.abc import Iterator

import torch

from crosspool.backends.cuda.chunks.chunk_crossing import ChunkCrossing
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_plan import ChunkPlan
from crosspool.backends.cuda.weights_rank.patience import Patience


def ffn_chunk(ffn: ChunkFFN, crossing: ChunkCrossing, plan: ChunkPlan, patience: Patience) -> Iterator[int]:
    """Enqueue the chunk's kernels on torch's current stream; yields each crossing's number before its wait."""
    for layer in range(plan.num_layers):
        for piece in plan.pieces:
            yield plan.crossing(layer, piece)
            crossing.wait(layer, piece)
            (rows,) = crossing.received(layer, piece, torch.bfloat16)
            with patience.timed(piece.num_tokens):
                ffn.run(layer, ffn.take(rows), crossing.sums(layer, piece))
            crossing.raise_flags(layer, piece)
