"""Spans: the slots that the last token of each of a step's rows sees, and which rows' slots are gathered together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from crosspool.backends.base import FloatArray, IntArray
from crosspool.backends.sequences.row_slots import RowSlots

MAX_PADDING = 1.5
"""Rows are padded to the longest one's slots, unless that makes them so many times as many."""

MAX_GATHERED = 2048
"""Slots that are gathered at once at most, so that they stay in the second cache."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [begin, end) of one row."""

    row: RowSlots
    begin: int
    end: int

    @classmethod
    def of(cls, row: RowSlots, window: int | None) -> "Span":
        """What the row's last token sees."""
        return cls(row, 0 if window is None else max(0, row.num_slots - window), row.num_slots)


class Block:
    """Neighbouring rows of a step whose slots are gathered together, each from the page on in which its span begins.

    start, stop: their places in the batch. num_slots: of each row, padded to the longest. frames: of the pages,
    (frames_per_page, rows, pages), 0 for a page that a row does not have. padding: (row, begin, end) of slots that a
    row does not see. hidden: (rows, 1, 1, num_slots), -inf on those, else 0; None where there are none.
    """

    def __init__(self, spans: Sequence[Span], start: int, page_tokens: int) -> None:
        self.spans = tuple(spans)
        self.start, self.stop = start, start + len(spans)
        if len(spans) == 1:
            return  # attended to where its pages lie
        first_pages = [span.begin // page_tokens for span in spans]
        seen = [
            (span.begin - page * page_tokens, span.end - page * page_tokens)
            for span, page in zip(spans, first_pages, strict=True)
        ]
        self.num_slots = max(end for _, end in seen)
        num_pages = (self.num_slots - 1) // page_tokens + 1
        self.frames: IntArray = np.zeros((len(spans[0].row.frames), len(spans), num_pages), dtype=np.int64)
        for idx, (span, page) in enumerate(zip(spans, first_pages, strict=True)):
            own = span.row.frames[:, page : (span.end - 1) // page_tokens + 1]
            self.frames[:, idx, : own.shape[1]] = own
        self.padding = [
            (idx, *part)
            for idx, (begin, end) in enumerate(seen)
            for part in ((0, begin), (end, self.num_slots))
            if part[0] < part[1]
        ]
        self.hidden: FloatArray | None = None
        if self.padding:
            self.hidden = np.zeros((len(spans), 1, 1, self.num_slots), dtype=np.float32)
            for idx, begin, end in self.padding:
                self.hidden[idx, ..., begin:end] = -np.inf


def blocks(spans: Sequence[Span], page_tokens: int) -> Iterator[Block]:
    """The rows of a step in blocks of what is worth gathering together."""
    start, longest, total = 0, 0, 0
    for idx, span in enumerate(spans):
        length = span.end - span.begin
        longest, total = max(longest, length), total + length
        padded = (idx + 1 - start) * longest
        if idx > start and (padded > MAX_GATHERED or padded > MAX_PADDING * total):
            yield Block(spans[start:idx], start, page_tokens)
            start, longest, total = idx, length, length
    yield Block(spans[start:], start, page_tokens)
