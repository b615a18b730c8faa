"""StepsAhead: hands out a lane's next decode step while its present one runs.

So ranks need not wait for the engine between two steps. Such a step holds a row for each sequence that is sure to go on
unless its very next token ends it.
"""

from dataclasses import dataclass

from crosspool.engine.decode_steps import DecodeSteps
from crosspool.engine.lanes import Lane
from crosspool.engine.live_models import num_decode_batches
from crosspool.engine.step_start import decode_row
from crosspool.scheduler.step import StepDescriptor


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """Steps behind those that `decode` has handed out, of the models, pages and ranks that it knows."""

    decode: DecodeSteps

    def fill(self, now: float) -> list[StepDescriptor]:
        """A step behind each running decode step that has none yet.

        Up to as many models as lanes keep their lanes; of more, the one whose turn is next goes behind the step that
        runs longest. Parked steps come first: while there are any, lanes run empty.
        """
        if self.decode.parked.steps:
            return []
        lanes = [lane for lane in self.decode.lanes if lane.phase == "decode"]
        open_ = [
            (lane.present.started_s, lane)
            for lane in lanes
            if lane.present is not None and lane.queued is None and not lane.present.is_abandoned
        ]
        if not open_:
            return []
        keep_lanes = num_decode_batches(self.decode.live_models.values(), self.decode.ranks) <= len(lanes)
        next_step = self._same_again if keep_lanes else self.decode.step_behind
        steps = (next_step(lane, now) for _, lane in sorted(open_, key=lambda entry: entry[0]))
        return [step for step in steps if step is not None]

    def _same_again(self, lane: Lane, now: float) -> StepDescriptor | None:
        """The decode step after the running one of the same model: one token further for every sequence in that.

        None where the next row of a sequence cannot be known yet (its grammar has to see the token first), and where a
        sequence would have to wait for a page.
        """
        assert lane.step is not None
        known = self.decode
        name, home = lane.step.header.model, lane.step.header.kv_rank
        live = known.live_models.get(name)
        if live is None or not known.ranks.are_up(live.needs[home], name):
            return None
        if known.under_way().count((name, home)) != 1:
            return None
        batch = []
        for sequence in live.decoding.values():
            if sequence.kv_rank != home:
                continue
            if sequence.in_step:
                if sequence.request.constraint is not None:
                    return None
                if sequence.num_generated_tokens + sequence.num_ahead >= sequence.request.sampling.max_tokens:
                    continue  # the running step gives its last token
            if not known.kv.of(sequence).ensure_slot_ahead(sequence):
                return None
            batch.append(sequence)
        if not batch:
            return None
        num_steps = known.run_length.of(live, batch)
        rows = [decode_row(sequence, sequence.num_ahead) for sequence in batch]
        return known.starter.start(lane, live, home, batch, rows, now, num_steps)
