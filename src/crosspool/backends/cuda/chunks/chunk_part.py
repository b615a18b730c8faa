"""What layers of one shape of attention share in a piece of a prompt: made once a step, looked at in every layer."""

from dataclasses import dataclass

import torch

from crosspool.backends.cuda.chunks.prefill_piece import Library, PieceAttention, span_rows
from crosspool.backends.cuda.kernels.prefill_shapes import key_dim
from crosspool.backends.cuda.kernels.rope import RopeTable
from crosspool.models.spec import GQASpec, MLASpec


@dataclass(frozen=True)
class ChunkPart:
    """rope, positions, table_rows: of the piece's rows. library: how its spans run. query_rows: what its queries need:
    its tokens, and room for what its spans compute behind them."""

    spec: GQASpec | MLASpec
    rope: RopeTable
    positions: torch.Tensor
    table_rows: torch.Tensor
    attention: PieceAttention
    library: Library
    query_rows: int

    @classmethod
    def of(
        cls,
        spec: GQASpec | MLASpec,
        rope: RopeTable,
        positions: torch.Tensor,
        table_rows: torch.Tensor,
        attention: PieceAttention,
        library: Library,
    ) -> "ChunkPart":
        rows = span_rows(len(positions), [span.span for span in attention.spans])
        return cls(spec, rope, positions, table_rows, attention, library, rows)

    def queries(self) -> torch.Tensor:
        """(query_rows, heads, D) bf16, where the spans find them if they are of one sequence."""
        room = self.library.queries(self.query_rows, [span.span for span in self.attention.spans])
        if room is not None:
            return room
        shape = (self.query_rows, self.spec.num_heads, key_dim(self.spec))
        return torch.empty(shape, dtype=torch.bfloat16, device=self.positions.device)
