"""A chunk's rows on the host, and what the attention of its pieces is made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from crosspool.backends.base import IntArray
from crosspool.backends.cuda.chunks.chunk_plan import ChunkPlan
from crosspool.backends.cuda.chunks.prefill_blocks import (
    NO_SPANS,
    Round,
    Span,
    SpanSizes,
    expanded_rounds,
    frame_round,
    span_keys,
    spans,
    stretches,
)
from crosspool.backends.cuda.chunks.prefill_piece import DeviceRound, DeviceSpan, PieceAttention
from crosspool.backends.cuda.kernels.prefill_shapes import EXPANDED_KEYS, span_sizes, tile_of
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A step's rows: arrays over its tokens, and each row's frames (frames_per_page, pages)."""

    token_ids: IntArray
    positions: IntArray
    row_of_token: IntArray
    tables: list[IntArray]

    @classmethod
    def of(cls, batch: Batch) -> "ChunkRows":
        token_ids, positions, rows = np.array([batch.token_ids, batch.positions, batch.row_of_token], dtype=np.int64)
        return cls(token_ids, positions, rows, batch.tables)


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """One piece's attention before its arrays are on the device."""

    spec: GQASpec | MLASpec
    spans: Sequence[Span]
    rounds: Sequence[Round]

    @property
    def arrays(self) -> list[npt.NDArray[np.int32]]:
        """All of them, in the order in which `with_arrays` takes them back."""
        found = [array for span in self.spans for array in span_keys(span)]
        return found + [
            array for part in self.rounds for array in (part.blocks, part.key_table_rows, part.key_positions)
        ]

    def with_arrays(self, held: Iterator[torch.Tensor]) -> PieceAttention:
        return PieceAttention(
            tuple(DeviceSpan(span, next(held), next(held)) for span in self.spans),
            tuple(DeviceRound(next(held), next(held), next(held)) for _ in self.rounds),
        )


def plan_attention(
    spec: ModelSpec,
    rows: ChunkRows,
    plan: ChunkPlan,
    geometry: PageGeometry,
    sizes: SpanSizes | None,
    device: torch.device,
) -> list[PlannedPiece]:
    """For every shape of attention and each piece. sizes: of spans; None: those of the device."""
    found = []
    for shape in spec.shapes:
        is_alone = shape.kv_elements_per_token == geometry.elements_per_token_layer  # in its slot
        own_sizes = sizes or (span_sizes(shape, device) if is_alone else NO_SPANS)
        for piece in plan.pieces:
            own = slice(piece.start, piece.stop)
            parts = stretches(rows.row_of_token[own], rows.positions[own], own_sizes)
            block_rows = tile_of(shape).rows
            rounds = [frame_round(parts, block_rows)]
            if isinstance(shape, MLASpec):
                rounds = expanded_rounds(parts, block_rows, EXPANDED_KEYS)
            found.append(PlannedPiece(shape, [span for part in parts for span in spans(part, own_sizes)], rounds))
    return found


def frame_tables(batch: ChunkRows) -> npt.NDArray[np.int32]:
    """(rows, pages, frames_per_page) of the step's sequences; frame 0 behind a table's end."""
    pages = max(table.shape[1] for table in batch.tables)
    held = np.zeros((len(batch.tables), pages, batch.tables[0].shape[0]), dtype=np.int32)
    for row, table in enumerate(batch.tables):
        held[row, : table.shape[1]] = table.T
    return held
