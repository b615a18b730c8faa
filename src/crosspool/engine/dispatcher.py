"""Dispatcher: the lanes, and which parts fill them: replays of parked steps, decode batches and prefill chunks."""

from collections.abc import Mapping

from crosspool.engine.config import EngineConfig
from crosspool.engine.decode_steps import DecodeSteps, RunLength
from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lanes import Flight, Lane
from crosspool.engine.live_models import LiveModel
from crosspool.engine.parked_steps import ParkedSteps
from crosspool.engine.prefill_ranks import PrefillRanks
from crosspool.engine.prefill_steps import PrefillSteps
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.sequence import Sequence
from crosspool.engine.step_start import StepStart
from crosspool.engine.steps_ahead import StepsAhead
from crosspool.engine.turns import Turns
from crosspool.scheduler.step import Phase, StepDescriptor


class Dispatcher:
    """The lanes and parked steps. Reads the core's models, pages and ranks; changes only sequences' rows and pages."""

    def __init__(
        self,
        config: EngineConfig,
        live_models: Mapping[str, LiveModel],
        kv: KVPages,
        ranks: RankHealth,
    ) -> None:
        self.lanes = [
            Lane(index, "decode" if index < config.num_decode_lanes else "prefill") for index in range(config.num_lanes)
        ]
        self.parked_steps = ParkedSteps(self.lanes, live_models, ranks)
        self.prefill_ranks = PrefillRanks(config, ranks)
        self._live_models = live_models
        self._turns: dict[Phase, Turns] = {"decode": Turns(), "prefill": Turns()}
        starter = StepStart(self._turns, kv)
        run_length = RunLength(config.decode_steps, config.num_decode_lanes, live_models, kv, ranks)
        self._decode = DecodeSteps(
            self.lanes, self.parked_steps, self._turns["decode"], live_models, kv, ranks, run_length, starter
        )
        self.ahead = StepsAhead(self._decode)
        self._prefill = PrefillSteps(
            config, self.lanes, self._turns["prefill"], live_models, kv, ranks, self.prefill_ranks, starter
        )

    @property
    def num_stalls(self) -> int:
        """Rows that were left out of decode steps for want of a page."""
        return self._decode.num_stalls

    def add_model(self, name: str) -> None:
        for turns in self._turns.values():
            turns.add(name)

    def remove_model(self, name: str) -> None:
        for turns in self._turns.values():
            turns.remove(name)
        self.prefill_ranks.remove_model(name)

    def take_turn(self, name: str, phase: Phase) -> None:
        """The model has got a lane of the phase: its next turn comes after everyone else's."""
        self._turns[phase].take(name)

    def fill(self, now: float) -> list[StepDescriptor]:
        """A step for every idle lane that has work; replays come first."""
        steps = self.parked_steps.replays(now)
        for lane in self.lanes:
            if lane.step is None:
                step = self._decode.step(lane, now) if lane.phase == "decode" else self._prefill.step(lane, now)
                if step is not None:
                    steps.append(step)
        return steps

    def ended(self, lane: int, step_seq: int, now: float) -> Flight | None:
        """Take the lane's running step out if it has that number; the step behind it runs now.

        None if nobody waits for the step: its number is another one's, or its sequences have left.
        """
        found = self.lanes[lane].present
        if found is None or found.step.header.step_seq != step_seq:
            return None
        self.lanes[lane].finish(now)
        return None if found.is_abandoned else found

    def told(self, lane: int, step_seq: int) -> Flight | None:
        """The lane's running step, if it has that number, and a step of its run has ended. None as in `ended`."""
        found = self.lanes[lane].present
        if found is None or found.step.header.step_seq != step_seq or found.is_abandoned:
            return None
        found.tell()
        return found

    def failed(self, lane: int, step_seq: int, now: float) -> tuple[Flight | None, tuple[Sequence, ...]]:
        """`ended` for a step that failed, and the sequences of the step behind it, which does not run either.

        Where the step behind the running one fails by itself it is simply taken back.
        """
        found = self.lanes[lane]
        if found.queued is not None and found.queued.step.header.step_seq == step_seq:
            return None, found.withdraw()
        is_present = found.present is not None and found.present.step.header.step_seq == step_seq
        flight = self.ended(lane, step_seq, now)
        return flight, found.cancel() if is_present else ()

    def kv_rank_lost(self, kv_rank: str) -> None:
        """The rank's sequences leave their steps."""
        for flight in [flight for lane in self.lanes for flight in lane.flights()]:
            header = flight.step.header
            if kv_rank in self._live_models[header.model].needs[header.kv_rank]:
                flight.abandon()
        self.parked_steps.kv_rank_lost(kv_rank)
