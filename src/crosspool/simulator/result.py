"""GroupResult: what one simulated group did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crosspool.simulator.driver import CoreDriver
from crosspool.simulator.group import SimulatedGroup
from crosspool.simulator.measures import ModelMeasures, TimeAverage, merged


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """One group. busy_s: seconds each station worked; in_flight_s: seconds in which some step was in flight.

    frame_budget and occupancy (frames held over time): by KV rank. num_events: of the simulation, not of the engine.
    """

    name: str
    layout: str
    stations: tuple[str, ...]
    duration_s: float
    num_events: int
    num_steps: int
    num_stalls: int
    num_unfinished: int
    busy_s: tuple[float, ...]
    in_flight_s: float
    frame_bytes: int
    frame_budget: Mapping[str, int]
    occupancy: Mapping[str, TimeAverage]
    models: Mapping[str, ModelMeasures]

    @property
    def total(self) -> ModelMeasures:
        return merged(list(self.models.values()))

    def bubble_share(self, station: int) -> float:
        """Part of the time with work in flight in which the station had nothing to run."""
        return max(0.0, 1.0 - self.busy_s[station] / self.in_flight_s) if self.in_flight_s else 0.0


def group_result(
    group: SimulatedGroup,
    driver: CoreDriver,
    *,
    duration_s: float,
    num_events: int,
    busy_s: Sequence[float],
    in_flight_s: float,
) -> GroupResult:
    core = driver.core
    return GroupResult(
        name=group.name,
        layout=group.layout,
        stations=group.stations,
        duration_s=duration_s,
        num_events=num_events,
        num_steps=core.num_steps,
        num_stalls=core.dispatcher.num_stalls,
        num_unfinished=driver.num_live,
        busy_s=tuple(busy_s),
        in_flight_s=in_flight_s,
        frame_bytes=group.config.frame_bytes,
        frame_budget={name: pages.pool.budget for name, pages in core.kv.by_rank.items()},
        occupancy=driver.occupancy,
        models=driver.measures,
    )
