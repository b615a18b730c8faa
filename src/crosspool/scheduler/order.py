"""Which ready segment a worker runs next: pure functions shared by workers, simulator and resident kernel.

A segment is one layer's attention, one layer's FFN, or a step's tail. Segments take a worker one at a time; without an
order two lanes can phase-lock (both want the same pool at once) and lose the pipeline.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A lane's next piece of work whose inputs have arrived."""

    lane: int
    priority: int
    ticket: int  # grows with the moment the segment became ready


OrderPolicy = Callable[[Sequence[Segment]], Segment]


def lowest_lane(ready: Sequence[Segment]) -> Segment:
    """No ordering: whichever lane is looked at first."""
    return min(ready, key=lambda segment: segment.lane)


def by_ticket(ready: Sequence[Segment]) -> Segment:
    """First ready, first run."""
    return min(ready, key=lambda segment: segment.ticket)


def by_priority(ready: Sequence[Segment]) -> Segment:
    """Decode lanes before prefill lanes, then first ready, first run."""
    return min(ready, key=lambda segment: (segment.priority, segment.ticket))


ORDER_POLICIES: dict[str, OrderPolicy] = {"none": lowest_lane, "ticket": by_ticket, "priority": by_priority}
