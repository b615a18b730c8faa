"""DecodeSteps: whose whole decode batch an idle lane gets, or goes behind another model's running step, and for how
many steps."""

from collections.abc import Container, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lanes import Lane
from crosspool.engine.live_models import LiveModel, num_decode_batches
from crosspool.engine.parked_steps import ParkedSteps
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.sequence import Sequence
from crosspool.engine.step_start import StepStart, decode_row
from crosspool.engine.turns import Turns
from crosspool.scheduler.step import LAYERS_PER_STEP, MAX_RUN_ROWS, MAX_RUN_STEPS, StepDescriptor


@dataclass(frozen=True, slots=True)
class RunLength:
    """Bounds runs by `longest` and by what anybody would have to wait for."""

    longest: int
    num_decode_lanes: int
    live_models: Mapping[str, LiveModel]
    kv: KVPages
    ranks: RankHealth

    def of(self, live: LiveModel, batch: Items[Sequence]) -> int:
        """How many steps the batch may take by itself: one, unless nobody would wait longer for that.

        None of its sequences reaches `max_tokens` or lacks a page within them, and none ends in a way that only the
        engine sees. Others of the model that wait to join, and other models that wait for a lane, come in after each
        step.
        """
        most = min(self.longest, MAX_RUN_STEPS, (LAYERS_PER_STEP - 1) // live.model.spec.num_layers)
        if most == 1 or len(batch) > MAX_RUN_ROWS or live.model.kv_split != "one":
            return 1
        waiting = live.prefilling or not live.queue.is_empty or self.kv.has_stalled
        if waiting or num_decode_batches(self.live_models.values(), self.ranks) > self.num_decode_lanes:
            return 1
        for sequence in batch:
            request = sequence.request
            if request.constraint is not None or request.has_stop_strings:
                return 1
            most = min(most, request.sampling.max_tokens - sequence.num_generated_tokens - sequence.num_ahead)
        has_pages = all(self.kv.of(sequence).ensure_slot_ahead(sequence, most) for sequence in batch)
        return max(1, most) if has_pages else 1


@dataclass(slots=True)
class DecodeSteps:
    """Models take turns; a model has a batch for each home of its decoding sequences.

    num_stalls: rows left out of a step because their sequences had no page for one more token.
    """

    lanes: Items[Lane]
    parked: ParkedSteps
    turns: Turns
    live_models: Mapping[str, LiveModel]
    kv: KVPages
    ranks: RankHealth
    run_length: RunLength
    starter: StepStart
    num_stalls: int = 0

    def step(self, lane: Lane, now: float) -> StepDescriptor | None:
        """The next model's whole decode batch: all its decoding sequences that have a slot for one more token."""
        flying = self.under_way()
        for name in self.turns.ready(self._decoding(flying)):
            live = self.live_models[name]
            for home in live.homes_of(live.decoding.values(), self.ranks):
                step = None if (name, home) in flying else self._batch(lane, live, home, now)
                if step is not None:
                    return step
        return None

    def step_behind(self, lane: Lane, now: float) -> StepDescriptor | None:
        """The decode step of the model whose turn comes next, behind another model's step.

        Steps behind one another have the same KV rank, which alone tells in which order they end; where the next model
        has another one the lane is left to become idle, so that it takes it.
        """
        assert lane.step is not None
        flying = self.under_way()
        for name in self.turns.ready(self._decoding(flying)):
            live, home = self.live_models[name], lane.step.header.kv_rank
            homes = [own for own in live.homes_of(live.decoding.values(), self.ranks) if (name, own) not in flying]
            if not homes:
                continue
            if home not in homes:
                return None
            step = self._batch(lane, live, home, now)
            if step is not None:
                return step
        return None

    def under_way(self) -> list[tuple[str, str]]:
        """Model and home of every decode step in flight or parked: decode requests that share both share one lane."""
        steps = [flight.step for lane in self.lanes if lane.phase == "decode" for flight in lane.flights()]
        steps += [parked.step for parked in self.parked.steps if parked.step.header.phase == "decode"]
        return [(step.header.model, step.header.kv_rank) for step in steps]

    def _decoding(self, flying: Container[tuple[str, str]]) -> set[str]:
        """Models with decoding sequences that may be in no step yet."""
        return {
            name
            for name, live in self.live_models.items()
            if live.decoding and any((name, home) not in flying for home in live.needs)
        }

    def _batch(self, lane: Lane, live: LiveModel, home: str, now: float) -> StepDescriptor | None:
        decoding = [sequence for sequence in live.decoding.values() if sequence.kv_rank == home]
        batch = [sequence for sequence in decoding if self.kv.of(sequence).ensure_slot(sequence)]
        self.num_stalls += len(decoding) - len(batch)
        if not batch:
            return None
        num_steps = self.run_length.of(live, batch)
        return self.starter.start(lane, live, home, batch, [decode_row(sequence) for sequence in batch], now, num_steps)
