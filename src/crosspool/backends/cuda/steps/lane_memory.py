"""One lane's words on one rank: epoch base and cursor on the device, and pinned words that host and device share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from crosspool.backends.cuda.channels.transport_params import MAX_PEERS, LaneView
from crosspool.backends.cuda.device.device_memory import pinned
from crosspool.backends.cuda.steps.pace import Pace, StepPace
from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.backends.cuda.steps.records import RING_SLOTS, RecordRing, RunPlace, RunRows

DONE, ABORT, LATE = 0, 1, 2
POSTED = LATE + MAX_PEERS
SEEN = POSTED + 1
"""Host words; LATE is one for each peer."""


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


class LaneMemory:
    """The words of one lane. Passes are pushed by the host in order; the device takes them in the same order."""

    def __init__(self, device: torch.device, rule: WaitRule) -> None:
        self.device = device
        self.rule = rule
        self.words = torch.zeros(16, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(PASS_TOKENS, dtype=torch.int32, device=device)
        self._host = pinned((SEEN + 1,), torch.int64, device)
        self.records = RecordRing(device)
        self.host_tokens = pinned((RING_SLOTS * PASS_TOKENS,), torch.int32, device)
        self._host_words = memoryview(self._host.numpy())  # quicker, word by word, than an array
        self._tokens = memoryview(self.host_tokens.numpy())
        self._last_epoch = 0
        self._paces: dict[tuple[str, int], Pace] = {}
        self._step_paces: dict[tuple[str, int], StepPace] = {}
        self._left = (0, 0)  # passes that were left behind others, and go on no more than those
        self.nears_end = False  # what runs is at its last steps: the next step may be handed over
        self._run_end = (-1, 0.0)

    def pace_of(self, model: str, num_rows: int) -> Pace:
        """Of the lane's runs of so many rows of the model."""
        return self._paces.get((model, num_rows)) or self._paces.setdefault((model, num_rows), Pace())

    def step_pace_of(self, model: str, num_rows: int) -> StepPace:
        """Of its single steps."""
        return self._step_paces.get((model, num_rows)) or self._step_paces.setdefault((model, num_rows), StepPace())

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
        return self._host_words[DONE]

    @property
    def seen_epoch(self) -> int:
        """The newest crossing that has arrived, as far as the host is told of crossings."""
        return self._host_words[SEEN]

    def late_epoch(self, peer: int) -> int:
        """The newest epoch that the peer (by its place in the placement) did not deliver in time; 0: none."""
        return self._host_words[LATE + peer]

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
        self._host_words[ABORT] = max(base, self._host_words[ABORT])
        self._abort_left()

    def _goes_on(self, last_epoch: int) -> bool:
        return max(self.done_epoch, self._host_words[ABORT]) < last_epoch

    def _abort_left(self) -> None:
        behind, base = self._left
        if base and not self._goes_on(behind):
            self._left = (0, 0)
            self._host_words[ABORT] = max(base, self._host_words[ABORT])

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
        token_ids: Sequence[int] = (),
        positions: Sequence[int] = (),
        sampling: npt.NDArray[np.void] | None = None,
        place: RunPlace | None = None,
    ) -> int:
        """Write the next pass's input; returns its slot. At most RING_SLOTS passes may be under way.

        sampling: (rows) SAMPLING; None: every row takes its best token. place: None: no run.
        """
        slot = self.records.write(base, rows, token_ids, positions, sampling, place)
        self._last_epoch = base + num_layers
        return slot

    def push_run(self, base: int, num_layers: int, over: int, rows: RunRows) -> list[int]:
        """`push` for every step of a run, the first of which has `base`; returns their slots.

        over: as in `RunPlace`.
        """
        slots = self.records.write_run(base, num_layers, over, rows)
        self._last_epoch = base + num_layers * rows.num_steps
        return slots

    def post(
        self, base: int, num_layers: int, layers_at: int, place: RunPlace | None = None, num_steps: int = 1
    ) -> None:
        """Push a pass to a resident server, or so many of a run one behind another, the first of which has `base`.

        layers_at: device address of its served layers. place: as in `push`, of the first.
        """
        self.records.write_served(base, num_layers, layers_at, place, num_steps)
        self._last_epoch = base + num_layers * num_steps
        self._host_words[POSTED] = self.records.num_written

    def tokens(self, slot: int, rows: int) -> list[int]:
        """What the pass of this slot sampled."""
        first = slot * PASS_TOKENS
        return self._tokens[first : first + rows].tolist()

    def tokens_of(self, slots: Sequence[int], rows: int) -> list[list[int]]:
        """The same of several slots."""
        firsts = [slot * PASS_TOKENS for slot in slots]
        return [self._tokens[first : first + rows].tolist() for first in firsts]

    def view(self) -> LaneView:
        return LaneView(
            self.words.data_ptr(), self._host.data_ptr(), self.rule.deadline_ns, 1 if self.rule.early else 0
        )

    @property
    def num_bytes(self) -> int:
        """Device memory."""
        return int(self.words.nbytes + self.last_tokens.nbytes)
