"""StepStart: makes a step of rows and starts it in a lane, or behind the step that runs there."""

from collections.abc import Mapping
from collections.abc import Sequence as Items

from crosspool.engine.batcher import Turns, make_step
from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lanes import Lane
from crosspool.engine.model_loads import ModelLoad
from crosspool.engine.sequence import Sequence
from crosspool.scheduler.step import NewSequence, Phase, StepDescriptor, StepRow


class StepStart:
    """The one place where lanes get steps that are not replays: turns pass on, and sequences join their home."""

    def __init__(self, turns: Mapping[Phase, Turns], kv: KVPages) -> None:
        self._turns = turns
        self._kv = kv

    def start(
        self,
        lane: Lane,
        load: ModelLoad,
        home: str,
        batch: Items[Sequence],
        rows: Items[StepRow],
        now: float,
        num_steps: int = 1,
        prefill_rank: str | None = None,
        next_model: str | None = None,
    ) -> StepDescriptor:
        """`rows`: one for each sequence of the batch, in its order. num_steps: of a run."""
        self._turns[lane.phase].take(load.model.name)
        joining: list[NewSequence] = []
        for sequence in batch:
            if not sequence.joined:
                self._kv.of(sequence).started(sequence)
                sequence.joined = True
                joining.append(sequence.introduction())
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
        step = make_step(
            lane=lane.index,
            step_seq=lane.next_seq(),
            model=load.model.name,
            kv_rank=home,
            phase=lane.phase,
            rows=rows,
            joining=joining,
            num_steps=num_steps,
            prefill_rank=prefill_rank,
            next_model=next_model,
        )
        lane.start(step, tuple(batch), now)
        return step
