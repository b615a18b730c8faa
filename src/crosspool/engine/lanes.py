"""Lanes: which step each one carries, and which is behind it.

A failed step leaves its lane, so that models whose ranks are well can use it (`parked_steps.py`).
"""

from dataclasses import dataclass

from crosspool.engine.sequence import Sequence
from crosspool.engine.stats import LaneStats
from crosspool.scheduler.step import Phase, StepDescriptor

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0


@dataclass(slots=True)
class Trouble:
    """Failures of one step since it was first handed out."""

    first_failed_s: float
    num_failures: int
    error: str

    def backoff_s(self) -> float:
        """How long to wait before a replay, when no rank is known to be down."""
        return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self.num_failures - 1, 16)))

    def describe(self, recovery_timeout_s: float) -> str:
        """One line on a step that is given up."""
        return (
            f"a step failed {self.num_failures} times within {recovery_timeout_s:g} s of recovery time; "
            f"last: {self.error}"
        )


@dataclass(slots=True)
class Flight:
    """One step that a lane carries, with the sequences of its rows.

    is_abandoned: nobody waits for its outcome and its sequences have left; it stays until its end is told, as the
    contract of `Cluster.submit` asks.
    """

    step: StepDescriptor
    sequences: tuple[Sequence, ...]
    started_s: float
    trouble: Trouble | None = None
    is_abandoned: bool = False
    num_told: int = 0  # steps of its run that have ended

    @property
    def num_left(self) -> int:
        """Steps of its run that have not ended."""
        return self.step.num_steps - self.num_told

    def tell(self) -> None:
        """A step of its run has ended, and it goes on with the next."""
        self.num_told += 1
        for sequence in self.sequences:
            sequence.num_ahead -= 1

    def abandon(self) -> None:
        """Let the sequences go; what the step does is of no interest any more."""
        self.leave()
        self.sequences, self.is_abandoned = (), True

    def take_back(self) -> None:
        """Let the sequences go as if the step had never been handed out."""
        for row, sequence in zip(self.step.rows, self.sequences, strict=not self.is_abandoned):
            if row.new_pages:
                sequence.table.resend_from(row.first_new_page)
        self.abandon()

    def leave(self) -> None:
        left = self.num_left
        for sequence in self.sequences:
            sequence.leave_step(left)


@dataclass(slots=True)
class Lane:
    """One lane: idle, or running `present`; `queued` was handed out behind it and runs next.

    `step_seq` starts at 1 and is never reused.
    """

    index: int
    phase: Phase
    step_seq: int = 0
    present: Flight | None = None
    queued: Flight | None = None

    @property
    def step(self) -> StepDescriptor | None:
        """The running step."""
        return None if self.present is None else self.present.step

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Those of the running step."""
        return () if self.present is None else self.present.sequences

    def flights(self) -> list[Flight]:
        """The running step and the one behind it, as far as there are such."""
        if self.present is None:
            return []
        return [self.present] if self.queued is None else [self.present, self.queued]

    def next_seq(self) -> int:
        self.step_seq += 1
        return self.step_seq

    def start(self, step: StepDescriptor, sequences: tuple[Sequence, ...], now: float) -> Flight:
        """Take a step: the running one of an idle lane, else the one behind it."""
        assert self.queued is None, f"lane {self.index} already has step {self.step_seq} behind its running one"
        assert step.header.step_seq == self.step_seq
        flight = Flight(step, sequences, now)
        if self.present is None:
            self.present = flight
        else:
            self.queued = flight
        for sequence in sequences:
            sequence.take_step(step.num_steps)
        return flight

    def finish(self, now: float) -> Flight:
        """The running step has ended and its sequences leave it; the one behind it runs now."""
        ended = self.present
        assert ended is not None
        ended.leave()
        self.present, self.queued = self.queued, None
        if self.present is not None:
            self.present.started_s = now
        return ended

    def withdraw(self) -> tuple[Sequence, ...]:
        """The step behind the running one will not run: its rows are to be made anew. Gives its sequences."""
        assert self.queued is not None
        sequences = self.queued.sequences
        self.queued.take_back()
        self.queued = None
        return sequences

    def cancel(self) -> tuple[Sequence, ...]:
        """The step that was behind a failed one will not run: as `withdraw`, but its end is still to be told."""
        if self.present is None:
            return ()
        sequences = self.present.sequences
        self.present.take_back()
        return sequences

    def stats(self) -> LaneStats:
        flight = self.present
        header = None if flight is None else flight.step.header
        return LaneStats(
            lane=self.index,
            phase=self.phase,
            state="idle" if header is None else "running",
            model=None if header is None else header.model,
            step_seq=self.step_seq if header is None else header.step_seq,
            num_seqs=len(self.sequences),
            since_s=None if flight is None else flight.started_s,
        )
