"""InFlight: the steps that ranks work on, and what is known of each. Pure."""

from dataclasses import dataclass

from crosspool.cluster.base import StepFailed
from crosspool.scheduler.step import StepHeader


@dataclass(slots=True)
class _Flight:
    header: StepHeader
    ranks: tuple[str, ...]
    failure: StepFailed | None = None  # to be told once the KV rank says that it has no result


class InFlight:
    """Steps by lane.

    A step ends only by its KV rank's word, unless that rank is lost: when a weights rank dies right after its last put,
    the KV rank may have finished the step already, and its sequences have moved on.
    """

    def __init__(self) -> None:
        self._flights: dict[int, _Flight] = {}

    def begin(self, header: StepHeader, ranks: tuple[str, ...]) -> None:
        """Raises ValueError if the lane's last step has not ended."""
        flight = self._flights.get(header.lane)
        if flight is not None:
            raise ValueError(
                f"lane {header.lane} still runs step {flight.header.step_seq}; submit step {header.step_seq} "
                "after its StepDone or StepFailed"
            )
        self._flights[header.lane] = _Flight(header, ranks)

    def end(self, lane: int, step_seq: int) -> tuple[tuple[str, ...], StepFailed | None] | None:
        """Take the step out: its ranks and the failure noted before; None if it has ended already."""
        flight = self._flights.get(lane)
        if flight is None or flight.header.step_seq != step_seq:
            return None
        del self._flights[lane]
        return flight.ranks, flight.failure

    def doom(self, lane: int, step_seq: int, failure: StepFailed) -> tuple[str, ...]:
        """Note why the step will fail. Gives the ranks to abort it on, none if it has ended or is doomed already."""
        flight = self._flights.get(lane)
        if flight is None or flight.header.step_seq != step_seq or flight.failure is not None:
            return ()
        flight.failure = failure
        return flight.ranks

    def is_led_by(self, rank: str, lane: int, step_seq: int) -> bool:
        """Whether the step is in flight and `rank` is its KV rank, whose word ends it."""
        flight = self._flights.get(lane)
        return flight is not None and flight.header.step_seq == step_seq and flight.header.kv_rank == rank

    def on_rank(self, rank: str) -> list[StepHeader]:
        """Headers of the steps that need the rank."""
        return [flight.header for flight in self._flights.values() if rank in flight.ranks]

    def is_on(self, rank: str) -> bool:
        return any(rank in flight.ranks for flight in self._flights.values())
