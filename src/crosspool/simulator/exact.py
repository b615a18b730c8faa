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


class ExactSimulator:
    """One group, segment by segment. spans: filled with every segment where a list is given.

    Raises ValueError for a monolithic layout, which has no crossings to be exact about.
    """

    def __init__(self, group: SimulatedGroup, spans: list[Span] | None = None) -> None:
        if group.layout != "crosspool":
            raise ValueError(f"layout {group.layout} has no put and wait; simulate it with mode steps")
        self.driver = CoreDriver(group)
        self._group, self._models = group, group.by_name
        self._pipeline = make_pipeline(group, group.config.num_lanes, spans)
        self._running: dict[int, StepDescriptor] = {}  # by lane, with those that are held
        self._behind: dict[int, StepDescriptor] = {}  # by lane
        self._held = HeldPrompts(self._running, group.prompts_wait) if group.prompts_wait else None
        self._in_flight_s = 0.0

    def run(
        self, requests: Iterable[SimulatedRequest], stop_s: float | None = None, progress: Progress | None = None
    ) -> GroupResult:
        """Run the requests, sorted by arrival, until all have ended or until `stop_s`."""
        driver, pipeline = self.driver, self._pipeline
        end_s = float("inf") if stop_s is None else stop_s
        arrivals = Arrivals(requests)
        now = 0.0
        while arrivals.next_s < float("inf") or driver.num_live:
            until = min(arrivals.next_s, driver.next_timer(now), end_s)
            assert until < float("inf") or self._running, "requests are live but nothing is going to happen"
            before = now
            lane = pipeline.advance(until)
            now = pipeline.now_s
            if self._running:
                self._in_flight_s += now - before
            driver.observe(now)
            if lane is not None:
                self._end(lane, now)
            elif now >= end_s:
                break
            else:
                driver.pass_time(arrivals, now)
            for step in driver.schedule(now):
                self._begin(step, now + self._group.host_s)
            if self._group.is_ahead:
                self._behind.update({step.header.lane: step for step in driver.schedule_ahead(now)})
            if progress is not None:
                progress(now)
        return group_result(
            self._group,
            driver,
            duration_s=now,
            num_events=pipeline.num_events,
            busy_s=pipeline.busy_s,
            in_flight_s=self._in_flight_s,
        )

    def _end(self, lane: int, now: float) -> None:
        """The lane's step has ended: what waited for it begins."""
        self.driver.end_step(lane, now)
        del self._running[lane]
        for prompt in self._held.freed_by(lane) if self._held is not None else ():
            self._start(prompt, now, has_neighbours=True)  # decode, which it waited for, goes on
        if lane in self._behind:
            self._begin(self._behind.pop(lane), now)

    def _begin(self, step: StepDescriptor, start_s: float) -> None:
        """A lane takes a step, which starts at `start_s` unless it is held."""
        has_neighbours = bool(self._running)
        self._running[step.header.lane] = step
        if self._held is None or not self._held.hold(step):
            self._start(step, start_s, has_neighbours=has_neighbours)

    def _start(self, step: StepDescriptor, start_s: float, *, has_neighbours: bool) -> None:
        group, model, header = self._group, self._models[step.header.model], step.header
        times = model.times(step_work(step), has_neighbours=has_neighbours)
        patience_s = group.patience.of(header, times)
        route = Route(kv=model.route.kv, weights=model.route.weights, priority=header.priority, patience_s=patience_s)
        if group.prompts_share and any(other.header.phase != header.phase for other in self._running.values()):
            if header.phase == "decode":
                times = model.sharing.decode(times)
            else:
                times = model.sharing.prompt(times, group.patience.allowed_s(header))
                route = twin_route(route, len(group.stations))
        self._pipeline.start(header.lane, times, route, start_s)


def simulate_exact(
    group: SimulatedGroup,
    requests: Iterable[SimulatedRequest],
    *,
    stop_s: float | None = None,
    spans: list[Span] | None = None,
    progress: Progress | None = None,
) -> GroupResult:
    """Run the requests, sorted by arrival, until all have ended or until `stop_s`. Raises as `ExactSimulator`."""
    return ExactSimulator(group, spans).run(requests, stop_s, progress)
