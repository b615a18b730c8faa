"""Layer-exact simulation: every put and wait of every step. For windows of a minute or so."""

from collections.abc import Callable, Iterable, Mapping

from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.scheduler.step import StepDescriptor
from crosspool.simulator.cost import step_work
from crosspool.simulator.driver import Arrivals, CoreDriver, SimulatedRequest
from crosspool.simulator.group import STREAMS, SimulatedGroup
from crosspool.simulator.pipeline import OrderedPipeline, Pipeline, Route, Span, StreamPipeline
from crosspool.simulator.result import GroupResult, group_result
from crosspool.simulator.sharing import twin_route

Progress = Callable[[float], None]
"""Called with the virtual time now and then."""


def make_pipeline(group: SimulatedGroup, num_lanes: int, spans: list[Span] | None = None) -> Pipeline:
    """The stations of a group under its order policy."""
    if group.order == STREAMS:
        return StreamPipeline(len(group.stations), num_lanes)
    return OrderedPipeline(len(group.stations), num_lanes, ORDER_POLICIES[group.order], spans=spans)


class HeldPrompts:
    """Chunks of prompts that wait until the decode steps that were under way have ended, as fused ones make them.

    running: the steps in flight, by lane. most_rows: of those that are fused.
    """

    def __init__(self, running: Mapping[int, StepDescriptor], most_rows: int) -> None:
        self._running, self._most_rows = running, most_rows
        self._held: list[tuple[StepDescriptor, set[int]]] = []

    def hold(self, step: StepDescriptor) -> bool:
        """Whether the step has to wait; decode never does."""
        if step.header.phase == "decode":
            return False
        decode = ((lane, other) for lane, other in self._running.items() if other.header.phase == "decode")
        lanes = {lane for lane, other in decode if len(other.rows) <= self._most_rows}
        if lanes:
            self._held.append((step, lanes))
        return bool(lanes)

    def freed_by(self, lane: int) -> list[StepDescriptor]:
        """Chunks that may begin now that the lane's step has ended."""
        for _, lanes in self._held:
            lanes.discard(lane)
        freed = [step for step, lanes in self._held if not lanes]
        self._held = [(step, lanes) for step, lanes in self._held if lanes]
        return freed


def simulate_exact(
    group: SimulatedGroup,
    requests: Iterable[SimulatedRequest],
    *,
    stop_s: float | None = None,
    spans: list[Span] | None = None,
    progress: Progress | None = None,
) -> GroupResult:
    """Run the requests, sorted by arrival, until all have ended or until `stop_s`.

    Raises ValueError for a monolithic layout, which has no crossings to be exact about.
    """
    if group.layout != "crosspool":
        raise ValueError(f"layout {group.layout} has no put and wait; simulate it with mode steps")
    driver = CoreDriver(group)
    pipeline = make_pipeline(group, group.config.num_lanes, spans)
    models = group.by_name
    end_s = float("inf") if stop_s is None else stop_s
    arrivals = Arrivals(requests)
    in_flight, in_flight_s, now = 0, 0.0, 0.0

    behind: dict[int, StepDescriptor] = {}  # by lane
    running: dict[int, StepDescriptor] = {}  # by lane
    held = HeldPrompts(running, group.prompts_wait) if group.prompts_wait else None

    def start(step: StepDescriptor, delay_s: float) -> None:
        model, header = models[step.header.model], step.header
        times = model.times(step_work(step), has_neighbours=in_flight > 0)
        patience_s = group.patience.of(header, times)
        route = Route(kv=model.route.kv, weights=model.route.weights, priority=header.priority, patience_s=patience_s)
        if group.prompts_share and any(other.header.phase != header.phase for other in running.values()):
            if header.phase == "decode":
                times = model.sharing.decode(times)
            else:
                times = model.sharing.prompt(times, group.patience.allowed_s(header))
                route = twin_route(route, len(group.stations))
        pipeline.start(header.lane, times, route, now + delay_s)

    def begin(step: StepDescriptor, delay_s: float) -> None:
        running[step.header.lane] = step
        if held is None or not held.hold(step):
            start(step, delay_s)

    while arrivals.next_s < float("inf") or driver.num_live:
        until = min(arrivals.next_s, driver.next_timer(now), end_s)
        assert until < float("inf") or in_flight, "requests are live but nothing is going to happen"
        before = now
        lane = pipeline.advance(until)
        now = pipeline.now_s
        if in_flight:
            in_flight_s += now - before
        driver.observe(now)
        if lane is not None:
            driver.end_step(lane, now)
            in_flight -= 1
            del running[lane]
            for prompt in held.freed_by(lane) if held is not None else ():
                start(prompt, 0.0)
            if lane in behind:
                begin(behind.pop(lane), 0.0)
                in_flight += 1
        elif now >= end_s:
            break
        else:
            driver.pass_time(arrivals, now)
        steps = driver.schedule(now)
        for step in steps:
            begin(step, group.host_s)
            in_flight += 1
        if group.is_ahead:
            behind.update({step.header.lane: step for step in driver.schedule_ahead(now)})
        if progress is not None:
            progress(now)
    return group_result(
        group,
        driver,
        duration_s=now,
        num_events=pipeline.num_events,
        busy_s=pipeline.busy_s,
        in_flight_s=in_flight_s,
    )
