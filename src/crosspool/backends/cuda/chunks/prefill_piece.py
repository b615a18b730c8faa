"""What a piece of a prompt brings to its attention: rounds of the kernel, and spans that a library runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from crosspool.backends.cuda.chunks.prefill_blocks import Round, Span
from crosspool.backends.cuda.chunks.span_attention import Part, SpanGraphs, full_attention
from crosspool.backends.cuda.device.uploads import upload_all
from crosspool.models.spec import GQASpec, MLASpec


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

    def queries(self, rows: int, spans: Sequence[Span]) -> torch.Tensor | None:
        """Where a piece's queries may lie so that its spans find them: those of its first sequence."""
        if self._graphs is None or not spans or any(span.stretch.first_row for span in spans):
            return None
        return None if rows > len(self._graphs.buffers.q) else self._graphs.buffers.q

    def slots(self, span: Span) -> torch.Tensor | None:
        """Room for a span's cache rows."""
        return self._graphs.buffers.slots[: span.count] if self._graphs else None

    def keys_and_values(self, span: Span) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Room for a span's expanded keys and values."""
        if self._graphs is None:
            return None
        held = self._graphs.buffers
        return held.keys[:, : span.count], held.values[:, : span.count]

    def run(
        self, spec: GQASpec | MLASpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span
    ) -> Part:
        """Attention of the span's rows of q (rows, heads, D) to its keys (kv_heads, count, D), in the room for them.

        The spans of a stretch come one after another, from its first key on: the first of them brings its queries.
        """
        part = span.stretch
        if self._graphs is None:
            return full_attention(q[part.first_row : part.first_row + span.rows], keys, values, spec.softmax_scale)
        room = self._graphs.buffers.q
        if span.first == 0 and q is not room:
            room[: part.num_rows].copy_(q[part.first_row : part.first_row + part.num_rows])
        return self._graphs.replay(span.rows, span.count, self._is_shared())


def span_rows(tokens: int, spans: Sequence[Span]) -> int:
    """Rows that a piece's queries need: its tokens, and what the spans compute behind them."""
    return max([tokens, *(span.stretch.first_row + span.rows for span in spans)])
