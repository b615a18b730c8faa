"""What the host writes for each pass of a lane, and a graph's first kernel, or the resident server, reads."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from crosspool.backends.cuda.device.device_memory import pinned
from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.units import align_up

RING_SLOTS = 64
"""Passes that may be enqueued ahead of the device."""

SAMPLING = np.dtype([("temperature", "<f8"), ("min_p", "<f8"), ("top_p", "<f8"), ("top_k", "<i4"), ("random", "<u4")])
"""How a row's token is drawn; temperature 0: the best one. `SampleRow` in `csrc/sample.cu`."""

SAMPLING_WORDS = SAMPLING.itemsize // 4
RUN_AT = 2 + (3 + SAMPLING_WORDS) * PASS_TOKENS
STOP_IDS = 8
_LEFT, _STEP, _ROWS, _LIMITS = (RUN_AT + word for word in (2, 3, 4, 5))
_STOPS = _LIMITS + PASS_TOKENS
_FOLLOWS = _STOPS + STOP_IDS * PASS_TOKENS
_IS_OVER = _FOLLOWS + 1
RECORD_WORDS = align_up(_IS_OVER + 1, 2)
"""A pass's input: its base (two words), then token ids, positions, lengths and sampling of its rows; and, from RUN_AT,
its place in a run and what ends that (`RunWord` in `csrc/lane_steps.cu`)."""


@dataclass(frozen=True)
class RunPlace:
    """One step's place in a run, and what ends the run early.

    over: the epoch that flags are raised to then. step, left: its number, and steps behind it. limits: of each row the
    first position for which it has no slot. stops: (rows, STOP_IDS) token ids, -1 where there are fewer. may_be_first:
    the run may end before its first step too.
    """

    over: int
    step: int
    left: int
    limits: npt.ArrayLike = ()
    stops: npt.NDArray[np.int32] | None = None
    may_be_first: bool = False


@dataclass(frozen=True, slots=True)
class RunRows:
    """The rows of a run.

    token_ids, positions: (rows) of its first step; rows that are not in use repeat the first, and those of later steps
    take the token of the one before. sampling: (steps, rows) SAMPLING; None: every row takes its best token. limits,
    stops: as in `RunPlace`, of the rows in use. follows: as bits, the rows of the lane's run before this one whose
    sequences are all that this one has; 0: it has others too, or none is before. is_over: they have all ended.
    """

    num_steps: int
    token_ids: Sequence[int]
    positions: Sequence[int]
    sampling: npt.NDArray[np.void] | None
    limits: npt.ArrayLike
    stops: npt.NDArray[np.int32]
    follows: int = 0
    is_over: bool = False

    def records(self) -> npt.NDArray[np.int32]:
        """(num_steps, RECORD_WORDS): what is the same in every run of so many steps and rows."""
        width, used, steps = len(self.token_ids), len(self.stops), np.arange(self.num_steps)
        found = np.zeros((self.num_steps, RECORD_WORDS), dtype=np.int32)
        found[1:, 2 : 2 + width] = -1 - np.arange(width) * (np.arange(width) < used)
        found[:, _LEFT] = self.num_steps - 1 - steps
        found[:, _STEP] = steps
        found[:, _ROWS] = used
        return found


class RecordRing:
    """The records of one lane in pinned memory: the host writes them in order, the device reads them in the same order.

    At most RING_SLOTS passes may be under way.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = pinned((RING_SLOTS, RECORD_WORDS), torch.int32, device)
        self.num_written = 0
        self._records: npt.NDArray[np.int32] = self.memory.numpy()
        self._words = self._records.reshape(-1).data  # quicker to write than an array, word by word
        self._of_runs: dict[tuple[int, int, int, bool], npt.NDArray[np.int32]] = {}  # by their shape

    def write(
        self,
        base: int,
        rows: int = 0,
        token_ids: Sequence[int] = (),
        positions: Sequence[int] = (),
        sampling: npt.NDArray[np.void] | None = None,
        place: RunPlace | None = None,
    ) -> int:
        """One pass's record, as `LaneMemory.push` takes it; returns its slot."""
        slot = self.num_written % RING_SLOTS
        first, words = slot * RECORD_WORDS, self._words
        _row_words(rows).pack_into(words, 4 * first, base, *token_ids, *positions, *[at + 1 for at in positions])
        drawn = first + 2 + 3 * rows
        count = SAMPLING_WORDS * rows
        words[drawn : drawn + count] = _GREEDY[:count] if sampling is None else sampling.view(np.int32).data
        if place is None:
            words[first + _LEFT] = 0
        else:
            _PLACE.pack_into(words, 4 * (first + RUN_AT), place.over, place.left, place.step)
            if place.stops is not None:
                record, used = self._records[slot], len(place.stops)
                record[_ROWS] = used
                record[_LIMITS : _LIMITS + used] = place.limits
                record[_STOPS : _STOPS + STOP_IDS * used] = place.stops.reshape(-1)
        self.num_written += 1
        return slot

    def write_run(self, base: int, num_layers: int, over: int, rows: RunRows) -> list[int]:
        """The records of all steps of a run, as `LaneMemory.push_run` takes them; returns their slots."""
        num_steps, width, used = rows.num_steps, len(rows.token_ids), len(rows.stops)
        key = (num_steps, width, used, rows.sampling is not None)
        found = self._of_runs.get(key)
        if found is None:
            found = self._of_runs[key] = rows.records()
        longs, steps = found.view(np.int64), np.arange(num_steps)
        positions = np.array(rows.positions) + steps[:, None]
        longs[:, 0] = base + num_layers * steps
        found[0, 2 : 2 + width] = rows.token_ids
        found[:, 2 + width : 2 + 2 * width] = positions
        found[:, 2 + 2 * width : 2 + 3 * width] = positions + 1
        if rows.sampling is not None:
            found[:, 2 + 3 * width : 2 + (3 + SAMPLING_WORDS) * width] = rows.sampling.view(np.int32)
        longs[:, RUN_AT // 2] = over
        found[:, _LIMITS : _LIMITS + used] = rows.limits
        found[:, _STOPS : _STOPS + STOP_IDS * used] = rows.stops.reshape(-1)
        found[0, _FOLLOWS] = rows.follows - (rows.follows >> 31 << 32)
        found[0, _IS_OVER] = rows.is_over
        self._records[self._next_slots(num_steps)] = found
        first = self.num_written
        self.num_written += num_steps
        return [slot % RING_SLOTS for slot in range(first, first + num_steps)]

    def write_served(
        self, base: int, num_layers: int, layers_at: int, place: RunPlace | None = None, num_steps: int = 1
    ) -> None:
        """The records of passes of a resident server, as `LaneMemory.post` takes them."""
        for step in range(num_steps):
            first, own = self.num_written % RING_SLOTS * RECORD_WORDS, base + num_layers * step
            over = 0 if place is None or place.step + step + place.may_be_first == 0 else place.over
            _SERVED.pack_into(self._words, 4 * first, own, layers_at, num_layers, 0, over)
            if place is None:
                self._words[first + _LEFT] = 0
            else:
                at = 4 * (first + RUN_AT)
                _PLACE.pack_into(self._words, at, place.over, place.left - step, place.step + step)
            self.num_written += 1

    def _next_slots(self, count: int) -> slice | npt.NDArray[np.int64]:
        """Where the next so many records lie."""
        first = self.num_written % RING_SLOTS
        if first + count <= RING_SLOTS:
            return slice(first, first + count)
        return (first + np.arange(count)) % RING_SLOTS


_PLACE = struct.Struct("=qii")
"""From RUN_AT on: over, left, step."""

_SERVED = struct.Struct("=qqiiq")
"""A resident server's pass: base, address and number of its layers, and what ends its run; 0: it begins in any case."""

_GREEDY = np.zeros(SAMPLING_WORDS * PASS_TOKENS, dtype=np.int32).data


@cache
def _row_words(rows: int) -> struct.Struct:
    """A record's base, and its rows' token ids, positions and lengths."""
    return struct.Struct(f"=q{3 * rows}i")
