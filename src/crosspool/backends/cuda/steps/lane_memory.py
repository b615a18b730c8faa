"""One lane's words on one rank: epoch base and cursor on the device, and pinned words that host and device share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from crosspool.backends.cuda.channels.transport_params import MAX_PEERS, LaneView
from crosspool.backends.cuda.steps.pace import Pace
from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.backends.cuda.steps.step_pace import StepPace
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

DONE, ABORT, LATE = 0, 1, 2
POSTED = LATE + MAX_PEERS
SEEN = POSTED + 1
"""Host words; LATE is one for each peer."""


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed host memory that the device reads and writes by the same address."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


@dataclass(frozen=True)
class WaitRule:
    """How waits on the device behave.

    deadline_s: of one wait; None: no wait at all, for profilers, which run one kernel at a time. early: kernels behind
    a wait may start beside it and load their weights meanwhile. NOTE: they then hold registers of every multiprocessor
    until the flag comes, so nothing else on the GPU runs: for a GPU that serves one lane and no second rank.
    """

    deadline_s: float | None = 4.0
    early: bool = False

    @property
    def deadline_ns(self) -> int:
        return -1 if self.deadline_s is None else int(self.deadline_s * 1e9)


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
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
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


class LaneMemory:
    """The words of one lane. Passes are pushed by the host in order; the device takes them in the same order."""

    def __init__(self, device: torch.device, rule: WaitRule) -> None:
        self.device = device
        self.rule = rule
        self.words = torch.zeros(16, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(PASS_TOKENS, dtype=torch.int32, device=device)
        self._host = pinned((SEEN + 1,), torch.int64, device)
        self.ring = pinned((RING_SLOTS, RECORD_WORDS), torch.int32, device)
        self.host_tokens = pinned((RING_SLOTS * PASS_TOKENS,), torch.int32, device)
        self._host_words: npt.NDArray[np.int64] = self._host.numpy()
        self._records: npt.NDArray[np.int32] = self.ring.numpy()
        self._longs: npt.NDArray[np.int64] = self._records.view(np.int64)
        self._tokens: npt.NDArray[np.int32] = self.host_tokens.numpy()
        self._tokens_seen, self._words_seen = memoryview(self._tokens), memoryview(self._host_words)  # quicker to read
        self._cursor = 0
        self._last_epoch = 0
        self._records_of: dict[tuple[int, int, int, bool], npt.NDArray[np.int32]] = {}  # of runs, by their shape
        self._paces: dict[tuple[str, int], Pace] = {}
        self._step_paces: dict[tuple[str, int], StepPace] = {}
        self._left = (0, 0)  # passes that were left behind others, and go on no more than those
        self.nears_end = False  # what runs is at its last steps: the next step may be handed over
        self._run_end = (-1, 0.0)

    def pace_of(self, model: str, num_rows: int) -> Pace:
        """Of the lane's runs of so many rows of the model."""
        return self._paces.setdefault((model, num_rows), Pace())

    def step_pace_of(self, model: str, num_rows: int) -> StepPace:
        """Of its single steps."""
        return self._step_paces.setdefault((model, num_rows), StepPace())

    def note_end(self, last_epoch: int, ended_s: float) -> None:
        """The run with this last epoch has ended, probably at that time (time.monotonic)."""
        self._run_end = (last_epoch, ended_s)

    def end_of(self, last_epoch: int) -> float | None:
        """When that run ended; None where it was not the last one to, or did so before its last step."""
        found, ended_s = self._run_end
        return ended_s if found == last_epoch else None

    @property
    def done_epoch(self) -> int:
        """The last epoch of the newest pass that has ended."""
        done: int = self._words_seen[DONE]
        return done

    @property
    def seen_epoch(self) -> int:
        """The newest crossing that has arrived, as far as the host is told of crossings."""
        return int(self._host_words[SEEN])

    def late_epoch(self, peer: int) -> int:
        """The newest epoch that the peer (by its place in the placement) did not deliver in time; 0: none."""
        late: int = self._words_seen[LATE + peer]
        return late

    @property
    def last_epoch(self) -> int:
        """The last epoch of the newest pass that was pushed."""
        return self._last_epoch

    def abort(self, base: int, behind: int = 0) -> None:
        """Make the waits of every pass up to `base` give up.

        behind: the last epoch of passes before those that are meant, which may go on: it happens once these have ended.
        """
        if behind and self._goes_on(behind):
            self._left = (behind, base)
            return
        self._host_words[ABORT] = max(base, int(self._host_words[ABORT]))
        self._abort_left()

    def _goes_on(self, last_epoch: int) -> bool:
        return max(self.done_epoch, int(self._host_words[ABORT])) < last_epoch

    def _abort_left(self) -> None:
        behind, base = self._left
        if base and not self._goes_on(behind):
            self._left = (0, 0)
            self._host_words[ABORT] = max(base, int(self._host_words[ABORT]))

    def abort_all(self) -> None:
        """Make every wait that is under way give up."""
        self.abort(self._last_epoch)

    @property
    def is_drained(self) -> bool:
        """Whether every pass pushed so far has ended; a new step begins no sooner, so that the ring never overflows."""
        self._abort_left()
        return self.done_epoch >= self._last_epoch

    def push(
        self,
        base: int,
        num_layers: int,
        rows: int = 0,
        token_ids: npt.ArrayLike = (),
        positions: npt.ArrayLike = (),
        sampling: npt.NDArray[np.void] | None = None,
        place: RunPlace | None = None,
    ) -> int:
        """Write the next pass's input; returns its slot. At most RING_SLOTS passes may be under way.

        sampling: (rows) SAMPLING; None: every row takes its best token. place: None: no run.
        """
        slot = self._cursor % RING_SLOTS
        record = self._records[slot]
        record[:2].view(np.int64)[0] = base
        if rows:
            record[2 : 2 + rows] = token_ids
            record[2 + rows : 2 + 2 * rows] = positions
            record[2 + 2 * rows : 2 + 3 * rows] = record[2 + rows : 2 + 2 * rows] + 1
            drawn = record[2 + 3 * rows : 2 + (3 + SAMPLING_WORDS) * rows]
            drawn[:] = 0 if sampling is None else sampling.view(np.int32)
        record[_LEFT] = 0 if place is None else place.left
        if place is not None:
            record[RUN_AT : RUN_AT + 2].view(np.int64)[0] = place.over
            record[_STEP] = place.step
            if place.stops is not None:
                used = len(place.stops)
                record[_ROWS] = used
                record[_LIMITS : _LIMITS + used] = place.limits
                record[_STOPS : _STOPS + STOP_IDS * used] = place.stops.reshape(-1)
        self._cursor += 1
        self._last_epoch = base + num_layers
        return slot

    def push_run(self, base: int, num_layers: int, over: int, rows: RunRows) -> list[int]:
        """`push` for every step of a run, the first of which has `base`; returns their slots.

        over: as in `RunPlace`.
        """
        num_steps, width, used = rows.num_steps, len(rows.token_ids), len(rows.stops)
        key = (num_steps, width, used, rows.sampling is not None)
        found = self._records_of.get(key)
        if found is None:
            found = self._records_of[key] = rows.records()
        longs, steps = found.view(np.int64), np.arange(num_steps)
        positions = rows.positions + steps[:, None]
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
        first = self._cursor
        self._cursor += num_steps
        self._last_epoch = base + num_layers * num_steps
        return [slot % RING_SLOTS for slot in range(first, first + num_steps)]

    def post(
        self, base: int, num_layers: int, layers_at: int, place: RunPlace | None = None, num_steps: int = 1
    ) -> None:
        """Push a pass to a resident server, or so many of a run one behind another, the first of which has `base`.

        layers_at: device address of its served layers. place: as in `push`, of the first.
        """
        steps = np.arange(num_steps)
        at = self._next_slots(num_steps)
        records, longs = self._records, self._longs
        longs[at, 0] = base + num_layers * steps
        longs[at, 1] = layers_at
        records[at, 4] = num_layers
        records[at, _LEFT] = 0 if place is None else place.left - steps
        longs[at, 3] = 0
        if place is not None:
            longs[at, RUN_AT // 2] = place.over
            records[at, _STEP] = place.step + steps
            longs[at, 3] = np.where(steps + place.step + place.may_be_first > 0, place.over, 0)
        self._cursor += num_steps
        self._last_epoch = base + num_layers * num_steps
        self._host_words[POSTED] = self._cursor

    def _next_slots(self, count: int) -> slice | npt.NDArray[np.int64]:
        """Where the next so many records lie."""
        first = self._cursor % RING_SLOTS
        if first + count <= RING_SLOTS:
            return slice(first, first + count)
        return (first + np.arange(count)) % RING_SLOTS

    def tokens(self, slot: int, rows: int) -> list[int]:
        """What the pass of this slot sampled."""
        first = slot * PASS_TOKENS
        found: list[int] = self._tokens[first : first + rows].tolist()
        return found

    def tokens_of(self, slots: Sequence[int], rows: int) -> list[list[int]]:
        """The same of several slots."""
        firsts = [slot * PASS_TOKENS for slot in slots]
        return [self._tokens_seen[first : first + rows].tolist() for first in firsts]

    def view(self) -> LaneView:
        return LaneView(
            self.words.data_ptr(), self._host.data_ptr(), self.rule.deadline_ns, 1 if self.rule.early else 0
        )

    @property
    def num_bytes(self) -> int:
        """Device memory."""
        return int(self.words.nbytes + self.last_tokens.nbytes)
