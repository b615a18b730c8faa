"""Lanes: which step each one carries, and steps parked until the ranks they need are back.

A failed step leaves its lane, so that models whose ranks are well can use it; it is *parked* with its rows and goes on
in any free lane of its phase as the same step under a new number.
"""

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

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


@dataclass(slots=True)
class Lane:
    """One lane: idle, or running `step`. `step_seq` starts at 1 and is never reused.

    is_abandoned: the step's KV rank was lost and its sequences have left; the lane stays taken until the step's end
    is told, as the contract of `Cluster.submit` asks.
    """

    index: int
    phase: Phase
    step_seq: int = 0
    step: StepDescriptor | None = None
    sequences: tuple[Sequence, ...] = ()
    started_s: float = 0.0
    trouble: Trouble | None = None
    is_abandoned: bool = False

    def next_seq(self) -> int:
        self.step_seq += 1
        return self.step_seq

    def start(self, step: StepDescriptor, sequences: tuple[Sequence, ...], now: float) -> None:
        assert self.step is None, f"lane {self.index} already runs step {self.step_seq}"
        assert step.header.step_seq == self.step_seq
        self.step, self.sequences, self.started_s = step, sequences, now
        for sequence in sequences:
            sequence.in_step = True

    def finish(self) -> tuple[StepDescriptor, tuple[Sequence, ...]]:
        """Make the lane idle; its sequences are in no step any more."""
        assert self.step is not None
        step, sequences = self.step, self.sequences
        self.abandon()
        self.step, self.trouble, self.is_abandoned = None, None, False
        return step, sequences

    def abandon(self) -> None:
        """Let the sequences go; what the step does is of no interest any more."""
        for sequence in self.sequences:
            sequence.in_step = False
        self.sequences, self.is_abandoned = (), True

    def stats(self) -> LaneStats:
        header = None if self.step is None else self.step.header
        return LaneStats(
            lane=self.index,
            phase=self.phase,
            state="idle" if header is None else "running",
            model=None if header is None else header.model,
            step_seq=self.step_seq,
            num_seqs=len(self.sequences),
            since_s=None if header is None else self.started_s,
        )


@dataclass(slots=True)
class ParkedStep:
    """A failed step that will be replayed: waiting for `ranks`, or for `not_before_s` where none of them is down."""

    step: StepDescriptor
    sequences: tuple[Sequence, ...]
    ranks: frozenset[str]
    trouble: Trouble
    not_before_s: float

    def is_ready(self, down: Collection[str], now: float) -> bool:
        return now >= self.not_before_s and not any(rank in down for rank in self.ranks)

    def drop(self, sequence: Sequence) -> None:
        """Leave one sequence's row out of the replay."""
        self.step, self.sequences = rows_of(self.step, self.sequences, [s for s in self.sequences if s is not sequence])
        sequence.in_step = False

    def replay_in(self, lane: Lane, now: float) -> StepDescriptor:
        """Start the same rows in an idle lane."""
        moved = replace(self.step, header=replace(self.step.header, lane=lane.index)).replayed(lane.next_seq())
        lane.start(moved, self.sequences, now)
        lane.trouble = self.trouble
        return moved


def rows_of(
    step: StepDescriptor, sequences: tuple[Sequence, ...], kept: Items[Sequence]
) -> tuple[StepDescriptor, tuple[Sequence, ...]]:
    """The part of a step that the sequences in `kept` have."""
    places = [place for place, sequence in enumerate(sequences) if sequence in kept]
    rows = tuple(step.rows[place] for place in places)
    ids = {row.sequence_id for row in rows}
    part = replace(
        step,
        header=replace(step.header, num_tokens=sum(row.num_new_tokens for row in rows)),
        rows=rows,
        joining=tuple(new for new in step.joining if new.sequence_id in ids),
    )
    return part, tuple(sequences[place] for place in places)
