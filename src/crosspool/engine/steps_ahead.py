"""StepsAhead: hands out a lane's next decode step while its present one runs.

So ranks need not wait for the engine between two steps. Such a step holds a row for each sequence that is sure to go on
unless its very next token ends it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from crosspool.engine.batcher import StepStart, decode_row
from crosspool.engine.decode_steps import DecodeSteps, RunLength
from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lanes import Lane
from crosspool.engine.model_loads import ModelLoad, num_decode_batches
from crosspool.engine.parked_steps import ParkedSteps
from crosspool.engine.ranks import RankHealth
from crosspool.scheduler.step import StepDescriptor


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """A step behind each running decode step that has none yet."""

    lanes: Items[Lane]
    parked: ParkedSteps
    decode: DecodeSteps
    loads: Mapping[str, ModelLoad]
    kv: KVPages
    ranks: RankHealth
    run_length: RunLength
    starter: StepStart

    def fill(self, now: float) -> list[StepDescriptor]:
        """A step behind each running decode step that has none yet.

        Up to as many models as lanes keep their lanes; of more, the one whose turn is next goes behind the step that
        runs longest. Parked steps come first: while there are any, lanes run empty.
        """
        if self.parked.steps:
            return []
        decode = [lane for lane in self.lanes if lane.phase == "decode"]
        open_ = [
            (lane.present.started_s, lane)
            for lane in decode
            if lane.present is not None and lane.queued is None and not lane.present.is_abandoned
        ]
        if not open_:
            return []
        keep_lanes = num_decode_batches(self.loads.values(), self.ranks) <= len(decode)
        next_step = self._same_again if keep_lanes else self.decode.step_behind
        steps = (next_step(lane, now) for _, lane in sorted(open_, key=lambda entry: entry[0]))
        return [step for step in steps if step is not None]

    def _same_again(self, lane: Lane, now: float) -> StepDescriptor | None:
        """The decode step after the running one of the same model: one token further for every sequence in that.

        None where the next row of a sequence cannot be known yet (its grammar has to see the token first), and where a
        sequence would have to wait for a page.
        """
        assert lane.step is not None
        name, home = lane.step.header.model, lane.step.header.kv_rank
        load = self.loads.get(name)
        if load is None or not self.ranks.are_up(load.needs[home]) or self.decode.under_way().count((name, home)) != 1:
            return None
        batch = []
        for sequence in load.decoding.values():
            if sequence.kv_rank != home:
                continue
            if sequence.in_step:
                if sequence.request.constraint is not None:
                    return None
                if sequence.num_generated_tokens + sequence.num_ahead >= sequence.request.sampling.max_tokens:
                    continue  # the running step gives its last token
            if not self.kv.of(sequence).ensure_slot_ahead(sequence):
                return None
            batch.append(sequence)
        if not batch:
            return None
        num_steps = self.run_length.of(load, batch)
        rows = [decode_row(sequence, sequence.num_ahead) for sequence in batch]
        return self.starter.start(lane, load, home, batch, rows, now, num_steps)
