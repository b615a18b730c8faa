"""ParkedSteps: failed steps that wait until they can be replayed.

A step is *parked* with its rows and goes on in any free lane of its phase as the same step under a new number.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from crosspool.engine.lanes import Lane, Trouble
from crosspool.engine.live_models import LiveModel
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState
from crosspool.scheduler.step import StepDescriptor


@dataclass(slots=True)
class ParkedStep:
    """A failed step that will be replayed: waiting for `ranks`, or for `not_before_s` where none of them is down."""

    step: StepDescriptor
    sequences: tuple[Sequence, ...]
    ranks: frozenset[str]
    trouble: Trouble
    not_before_s: float

    def drop(self, sequence: Sequence) -> None:
        """Leave one sequence's row out of the replay."""
        kept = [other for other in self.sequences if other is not sequence]
        self.step, self.sequences = _rows_of(self.step, self.sequences, kept)
        sequence.leave_step(self.step.num_steps)

    def replay_in(self, lane: Lane, now: float) -> StepDescriptor:
        """Start the same rows in an idle lane."""
        moved = replace(self.step, header=self.step.header._replace(lane=lane.index)).replayed(lane.next_seq())
        for sequence in self.sequences:
            sequence.leave_step(self.step.num_steps)
        lane.start(moved, self.sequences, now).trouble = self.trouble
        return moved


class ParkedSteps:
    """Parks steps out of lanes and replays them in idle ones. Reads models and ranks.

    num_replays: parked steps that were started again.
    """

    def __init__(self, lanes: Items[Lane], live_models: Mapping[str, LiveModel], ranks: RankHealth) -> None:
        self.num_replays = 0
        self.steps: list[ParkedStep] = []
        self._lanes = lanes
        self._live_models = live_models
        self._ranks = ranks

    def park(self, step: StepDescriptor, sequences: tuple[Sequence, ...], trouble: Trouble, now: float) -> None:
        """Keep a failed step, without the rows of sequences that have ended, until it can be replayed."""
        alive = [sequence for sequence in sequences if sequence.state is not SequenceState.ENDED]
        not_before_s = now + trouble.backoff_s() if self._ranks.are_up(self._ranks_of(step), step.header.model) else now
        self._keep(step, sequences, alive, trouble, not_before_s)

    def isolate(self, step: StepDescriptor, sequences: tuple[Sequence, ...], trouble: Trouble, now: float) -> None:
        """Replay a step in which a worker raised row by row, so that only the row that made it raise fails again."""
        for sequence in sequences:
            if sequence.state is not SequenceState.ENDED:
                self._keep(step, sequences, [sequence], replace(trouble), now)

    def drop(self, sequence: Sequence) -> None:
        """Leave an ended sequence out of the parked step that has a row of it, if one has."""
        for parked in self.steps:
            if sequence in parked.sequences:
                parked.drop(sequence)
        self.steps = [parked for parked in self.steps if parked.sequences]

    def kv_rank_lost(self, kv_rank: str) -> None:
        """Steps that need it are not replayed: their sequences are prefilled again."""
        self.steps = [parked for parked in self.steps if kv_rank not in parked.ranks]

    def replays(self, now: float) -> list[StepDescriptor]:
        """Those that are ready, started in idle lanes of their phases."""
        return [step for parked in list(self.steps) if (step := self._replay(parked, now)) is not None]

    def _keep(
        self,
        step: StepDescriptor,
        sequences: tuple[Sequence, ...],
        kept: Items[Sequence],
        trouble: Trouble,
        not_before_s: float,
    ) -> None:
        part, members = _rows_of(step, sequences, kept)
        in_pools = part.header._replace(prefill_rank=None, next_model=None)  # which can do it as well
        part = replace(part, header=in_pools)
        self.steps.append(ParkedStep(part, members, self._ranks_of(step), trouble, not_before_s))
        for sequence in members:
            sequence.take_step(part.num_steps)

    def _ranks_of(self, step: StepDescriptor) -> frozenset[str]:
        return frozenset(self._live_models[step.header.model].needs[step.header.kv_rank])

    def _replay(self, parked: ParkedStep, now: float) -> StepDescriptor | None:
        phase, model = parked.step.header.phase, parked.step.header.model
        idle = [lane for lane in self._lanes if lane.phase == phase and lane.step is None]
        if not idle or now < parked.not_before_s or not self._ranks.are_up(parked.ranks, model):
            return None
        own = [lane for lane in idle if lane.index == parked.step.header.lane]
        self.steps.remove(parked)
        self.num_replays += 1
        return parked.replay_in((own or idle)[0], now)


def _rows_of(
    step: StepDescriptor, sequences: tuple[Sequence, ...], kept: Items[Sequence]
) -> tuple[StepDescriptor, tuple[Sequence, ...]]:
    """The part of a step that the sequences in `kept` have."""
    places = [place for place, sequence in enumerate(sequences) if sequence in kept]
    rows = tuple(step.rows[place] for place in places)
    ids = {row.sequence_id for row in rows}
    part = replace(
        step,
        header=step.header._replace(num_tokens=sum(row.num_new_tokens for row in rows)),
        rows=rows,
        joining=tuple(new for new in step.joining if new.sequence_id in ids),
    )
    return part, tuple(sequences[place] for place in places)
