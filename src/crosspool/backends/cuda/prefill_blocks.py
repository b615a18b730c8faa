"""Which queries of a piece see which keys: the blocks and rounds that the prefill kernel is launched with.

Pure arithmetic on the host, once a step. A piece's tokens fall into stretches of one sequence each. For caches that
attention reads where they lie there is one round; for latents that must be expanded first, rounds of a bounded number
of keys, cut out of all stretches' contexts one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

FIELDS = 8
"""Words of a block as `prefill_kernel` reads them."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring tokens of a piece that belong to one sequence: rows [first_row, first_row + num_rows) of the piece,
    at positions from `position`; `table_row` is the sequence's row of the step's frame tables."""

    first_row: int
    num_rows: int
    position: int
    table_row: int

    @property
    def num_keys(self) -> int:
        """Keys that its last token sees."""
        return self.position + self.num_rows


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys [first, stop) of one stretch's sequence."""

    stretch: Stretch
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Round:
    """One launch: blocks (count, FIELDS), the longest first; the keys it expands, (count) each; none: in frames."""

    blocks: IntArray
    key_table_rows: IntArray
    key_positions: IntArray


def stretches(row_of_token: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> list[Stretch]:
    """The stretches of a piece from each token's row of the step and position."""
    bounds = [0, *(np.flatnonzero(np.diff(row_of_token)) + 1).tolist(), len(row_of_token)]
    return [
        Stretch(first, stop - first, int(positions[first]), int(row_of_token[first]))
        for first, stop in pairwise(bounds)
    ]


def frame_round(parts: Sequence[Stretch], block_rows: int) -> Round:
    """The one round of a cache that is read in its frames."""
    blocks = [block for part in parts for block in _blocks(part, block_rows, 0, 0, part.num_keys)]
    nothing = np.zeros(0, dtype=np.int32)
    return Round(_packed(blocks), nothing, nothing)


def expanded_rounds(parts: Sequence[Stretch], block_rows: int, most_keys: int) -> list[Round]:
    """Rounds of at most `most_keys` keys, in the order of keys."""
    rounds: list[list[Keys]] = [[]]
    room = most_keys
    for part in parts:
        first = 0
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
        rows.append(np.full(part.stop - part.first, part.stretch.table_row, dtype=np.int32))
        positions.append(np.arange(part.first, part.stop, dtype=np.int32))
        at += part.stop - part.first
    return Round(_packed(blocks), np.concatenate(rows), np.concatenate(positions))


def _blocks(part: Stretch, block_rows: int, key_row: int, first: int, stop: int) -> list[tuple[int, ...]]:
    """Blocks of a stretch that see any key of [first, stop)."""
    found: list[tuple[int, ...]] = []
    for begin in range(0, part.num_rows, block_rows):
        count = min(block_rows, part.num_rows - begin)
        position = part.position + begin
        if position + count > first:
            found.append((part.first_row + begin, count, position, part.table_row, key_row, first, stop, 0))
    return found


def _packed(blocks: list[tuple[int, ...]]) -> IntArray:
    ordered = sorted(blocks, key=lambda block: min(block[6], block[2] + block[1]) - block[5], reverse=True)
    return np.array(ordered, dtype=np.int32).reshape(-1, FIELDS)
