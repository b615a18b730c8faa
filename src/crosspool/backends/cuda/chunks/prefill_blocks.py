"""Which queries of a piece see which keys: the launches that a piece's attention is made of.

Pure arithmetic on the host, once a step. A piece's tokens fall into stretches of one sequence each. A long stretch's
attention to keys far before it has no mask, and a library's kernel runs it in spans of few fixed sizes; what is left,
the diagonal included, is our kernel's: in one round where keys are read in the cache's frames, in rounds of a bounded
number of keys where they must be expanded first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from crosspool.backends.base import Int32Array
from crosspool.units import ceil_div

FIELDS = 8
"""Words of a block as `prefill_kernel` reads them."""


@dataclass(frozen=True, slots=True)
class SpanSizes:
    """What a library's kernel is launched with: few sizes, because each new one is planned anew.

    keys: descending, each a multiple of the next. rows: ascending; a stretch of fewer rows than `min_rows` takes none.
    """

    keys: tuple[int, ...]
    rows: tuple[int, ...]
    min_rows: int


SPAN_SIZES = SpanSizes(keys=(8192, 4096, 2048), rows=(1024, 2048), min_rows=512)
KEY_SIZES = (64, 128, 256, 512)
"""Rounds expand so many keys, or a multiple of the last."""

NO_SPANS = SpanSizes(keys=(), rows=(), min_rows=0)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens of a piece that belong to one sequence: rows [first_row, first_row + num_rows) of the piece,
    at positions from `position`; `table_row` is the sequence's row of the step's frame tables. Keys before `first_key`
    are the library's."""

    first_row: int
    num_rows: int
    position: int
    table_row: int
    first_key: int = 0

    @property
    def num_keys(self) -> int:
        """Keys that its last token sees."""
        return self.position + self.num_rows


@dataclass(frozen=True, slots=True)
class Span:
    """Keys [first, first + count) that `rows` rows of the piece from `first_row` on all see; the rows behind the
    stretch's own are computed and thrown away."""

    stretch: Stretch
    rows: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys [first, stop) of one stretch's sequence."""

    stretch: Stretch
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Round:
    """One launch: blocks (count, FIELDS), the longest first; the keys it expands, (count) each; none: in frames."""

    blocks: Int32Array
    key_table_rows: Int32Array
    key_positions: Int32Array


def stretches(row_of_token: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], sizes: SpanSizes) -> list[Stretch]:
    """The stretches of a piece from each token's row of the step and position."""
    bounds = [0, *(np.flatnonzero(np.diff(row_of_token)) + 1).tolist(), len(row_of_token)]
    found = []
    for first, stop in pairwise(bounds):
        position = int(positions[first])
        takes_spans = sizes.keys and sizes.min_rows <= stop - first <= sizes.rows[-1]
        first_key = position // sizes.keys[-1] * sizes.keys[-1] if takes_spans else 0
        found.append(Stretch(first, stop - first, position, int(row_of_token[first]), first_key))
    return found


def spans(part: Stretch, sizes: SpanSizes) -> list[Span]:
    """The spans of [0, first_key)."""
    found, first = [], 0
    rows = next((rows for rows in sizes.rows if rows >= part.num_rows), 0)
    for count in sizes.keys:
        while part.first_key - first >= count:
            found.append(Span(part, rows, first, count))
            first += count
    return found


def span_keys(span: Span) -> tuple[Int32Array, Int32Array]:
    """(row of the frame table, position) of each key of a span."""
    return _keys_of(span.stretch, span.first, span.first + span.count)


def frame_round(parts: Sequence[Stretch], block_rows: int) -> Round:
    """The one round of a cache that is read in its frames."""
    blocks = [block for part in parts for block in _blocks(part, block_rows, 0, part.first_key, part.num_keys)]
    nothing = np.zeros(0, dtype=np.int32)
    return Round(_packed(blocks), nothing, nothing)


def expanded_rounds(parts: Sequence[Stretch], block_rows: int, most_keys: int) -> list[Round]:
    """Rounds of at most `most_keys` keys, in the order of keys."""
    rounds: list[list[Keys]] = [[]]
    room = most_keys
    for part in parts:
        first = part.first_key
        while first < part.num_keys:
            count = min(part.num_keys - first, room)
            rounds[-1].append(Keys(part, first, first + count))
            first, room = first + count, room - count
            if room == 0:
                rounds.append([])
                room = most_keys
    return [_round(keys, block_rows) for keys in rounds if keys]


def _round(keys: Sequence[Keys], block_rows: int) -> Round:
    blocks: list[tuple[int, ...]] = []
    rows, positions, at = [], [], 0
    for part in keys:
        blocks += _blocks(part.stretch, block_rows, at, part.first, part.stop)
        own_rows, own_positions = _keys_of(part.stretch, part.first, part.stop)
        rows.append(own_rows)
        positions.append(own_positions)
        at += part.stop - part.first
    behind = (0, padded_keys(at) - at)  # the last key again
    return Round(_packed(blocks), *(np.pad(np.concatenate(each), behind, "edge") for each in (rows, positions)))


def padded_keys(count: int) -> int:
    """Keys that are expanded for a round of so many: few sizes, as with a piece's rows."""
    return next((size for size in KEY_SIZES if size >= count), ceil_div(count, KEY_SIZES[-1]) * KEY_SIZES[-1])


def _keys_of(part: Stretch, first: int, stop: int) -> tuple[Int32Array, Int32Array]:
    return np.full(stop - first, part.table_row, dtype=np.int32), np.arange(first, stop, dtype=np.int32)


def _blocks(part: Stretch, block_rows: int, key_row: int, first: int, stop: int) -> list[tuple[int, ...]]:
    """Blocks of a stretch that see any key of [first, stop)."""
    found: list[tuple[int, ...]] = []
    for begin in range(0, part.num_rows, block_rows):
        count = min(block_rows, part.num_rows - begin)
        position = part.position + begin
        if position + count > first:
            found.append((part.first_row + begin, count, position, part.table_row, key_row, first, stop, 0))
    return found


def _packed(blocks: list[tuple[int, ...]]) -> Int32Array:
    ordered = sorted(blocks, key=lambda block: min(block[6], block[2] + block[1]) - block[5], reverse=True)
    return np.array(ordered, dtype=np.int32).reshape(-1, FIELDS)
