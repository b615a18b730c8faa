"""InFlight: the steps that ranks work on, and what is known of each. Pure."""

from dataclasses import dataclass

from crosspool.cluster.base import StepFailed
from crosspool.scheduler.step import StepHeader


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
