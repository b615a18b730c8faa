"""ClusterSteps: hands steps to ranks, keeps those in flight, and makes events of what ranks say of them. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crosspool.cluster import messages
from crosspool.cluster.base import Event, ModelPlacement, StepDone, StepFailed, StepTokens
from crosspool.cluster.messages import ToRank
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepHeader


@dataclass(slots=True)
class _Flight:
    header: StepHeader
    ranks: tuple[str, ...]
    failure: StepFailed | None = None  # to be told once the KV rank says that it has no result


STEPS_PER_LANE = 2
"""A running step and one behind it."""


class InFlight:
    """Steps by lane, at most two of each.

    A step ends only by its KV rank's word, unless that rank is lost: when a weights rank dies right after its last put,
    the KV rank may have finished the step already, and its sequences have moved on.
    """

    def __init__(self) -> None:
        self._flights: dict[tuple[int, int], _Flight] = {}  # by lane and step_seq

    def __bool__(self) -> bool:
        return bool(self._flights)

    def begin(self, header: StepHeader, ranks: tuple[str, ...]) -> int:
        """Take a step; gives the number of the one it comes behind, 0 if its lane is idle.

        Raises ValueError for a third step of a lane, and for one behind a step of another KV rank.
        """
        before = [flight.header for (lane, _), flight in self._flights.items() if lane == header.lane]
        is_next = all(other.kv_rank == header.kv_rank and other.step_seq < header.step_seq for other in before)
        if len(before) >= STEPS_PER_LANE or not is_next:
            numbers = " and ".join(str(other.step_seq) for other in before)
            raise ValueError(
                f"lane {header.lane} of {before[0].kv_rank} still runs step {numbers}; submit step {header.step_seq} "
                f"of {header.kv_rank} after its StepDone or StepFailed"
            )
        self._flights[header.lane, header.step_seq] = _Flight(header, ranks)
        return before[0].step_seq if before else 0

    def end(self, lane: int, step_seq: int) -> tuple[tuple[str, ...], StepFailed | None] | None:
        """Take the step out: its ranks and the failure noted before; None if it has ended already."""
        flight = self._flights.pop((lane, step_seq), None)
        return None if flight is None else (flight.ranks, flight.failure)

    def doom(self, lane: int, step_seq: int, failure: StepFailed) -> tuple[str, ...]:
        """Note why the step will fail. Gives the ranks to abort it on, none if it has ended or is doomed already."""
        flight = self._flights.get((lane, step_seq))
        if flight is None or flight.failure is not None:
            return ()
        flight.failure = failure
        return flight.ranks

    def is_led_by(self, rank: str, lane: int, step_seq: int) -> bool:
        """Whether the step is in flight and `rank` is its KV rank, whose word ends it."""
        flight = self._flights.get((lane, step_seq))
        return flight is not None and flight.header.kv_rank == rank

    def on_rank(self, rank: str) -> list[StepHeader]:
        """Headers of the steps that need the rank, a lane's in their order."""
        return [flight.header for flight in self._flights.values() if rank in flight.ranks]

    def is_on(self, rank: str) -> bool:
        return any(rank in flight.ranks for flight in self._flights.values())


class ClusterSteps:
    """Steps in flight. `send` takes a message to a rank, `tell` an event; both return at once."""

    def __init__(self, send: Callable[[str, ToRank], None], tell: Callable[[Event], None]) -> None:
        self._send = send
        self._tell = tell
        self._flights = InFlight()

    def __bool__(self) -> bool:
        return bool(self._flights)

    def is_on(self, rank: str) -> bool:
        """Whether a step needs the rank."""
        return self._flights.is_on(rank)

    def begin(self, step: StepDescriptor, placement: ModelPlacement, ranks: tuple[str, ...]) -> None:
        """Send a step to `ranks`, the leading one first of them. Raises ValueError as `InFlight.begin`."""
        header = step.header
        behind = self._flights.begin(header, ranks)
        for rank in reversed(ranks):  # the leading one last
            self._send(rank, messages.Step(header if rank in placement.weights_ranks else step, behind))

    def finished(self, rank: str, finished: messages.StepFinished) -> None:
        """A leading rank's half ended with tokens."""
        result = finished.result
        self.told(rank, result.lane, result.step_seq, finished.told)
        if self._flights.end(result.lane, result.step_seq) is not None:
            self._tell(StepDone(result=result))

    def told(self, rank: str, lane: int, step_seq: int, steps: Sequence[tuple[SampledToken, ...]]) -> None:
        """Tokens of steps of a run, if it still is the lane's and the rank leads it."""
        if steps and self._flights.is_led_by(rank, lane, step_seq):
            for sampled in steps:
                self._tell(StepTokens(lane=lane, step_seq=step_seq, sampled=sampled))

    def ended(self, rank: str, ended: messages.StepEnded) -> tuple[str, ...]:
        """A half ended without tokens. Gives the ranks that the leading one waited for in vain."""
        lane, step_seq = ended.lane, ended.step_seq
        if not self._flights.is_led_by(rank, lane, step_seq):
            self.doom(lane, step_seq, ended.waiting_on, ended.error, ended.fatal)
            return ()
        flight = self._flights.end(lane, step_seq)
        if flight is None:
            return ()
        ranks, noted = flight
        if noted is not None:
            self._tell(noted)
            return ()
        for other in ranks[1:]:
            self._send(other, messages.AbortStep(lane, step_seq))
        self.fail(lane, step_seq, ended.waiting_on, ended.error, ended.fatal)
        return ended.waiting_on

    def fail(self, lane: int, step_seq: int, waiting_on: tuple[str, ...], error: str, fatal: bool) -> None:
        """Tell that a step has failed."""
        self._tell(StepFailed(lane=lane, step_seq=step_seq, waiting_on=waiting_on, error=error, fatal=fatal))

    def doom(self, lane: int, step_seq: int, waiting_on: tuple[str, ...], error: str, fatal: bool) -> None:
        """Abort a step everywhere; it fails once its KV rank has agreed."""
        failed = StepFailed(lane=lane, step_seq=step_seq, waiting_on=waiting_on, error=error, fatal=fatal)
        for rank in self._flights.doom(lane, step_seq, failed):
            self._send(rank, messages.AbortStep(lane, step_seq))

    def drop_model(self, name: str, ranks: Sequence[str], error: str) -> None:
        """Abort every step of a model that lies on `ranks`."""
        for rank in ranks:
            for header in self._flights.on_rank(rank):
                if header.model == name:
                    self.doom(header.lane, header.step_seq, (), error, fatal=True)

    def lose(self, rank: str, error: str) -> None:
        """A rank is lost: steps that it led fail at once, others once their KV rank has agreed."""
        for header in self._flights.on_rank(rank):
            self.doom(header.lane, header.step_seq, (rank,), error, fatal=False)
            if rank == header.kv_rank:
                self._end_led(header)

    def _end_led(self, header: StepHeader) -> None:
        flight = self._flights.end(header.lane, header.step_seq)
        if flight is not None and flight[1] is not None:
            self._tell(flight[1])
