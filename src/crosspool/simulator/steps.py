"""Step-level simulation: one event for a step, or for a whole run of like steps. For days.

Steps in flight progress at rates: their time alone, stretched by what they do to each other (`overlap.py`). A lane
whose next steps are known to have the same rows (`engine/repeat.py`) runs them as one; whatever else happens meanwhile
first makes it catch up with the steps that have ended by then. Where every lane's next step has other rows (more
models decode than there are lanes), steps are run layer by layer until that is over.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import floor

from crosspool.scheduler.step import StepDescriptor
from crosspool.simulator.cost import decode_work, step_work
from crosspool.simulator.driver import Arrivals, CoreDriver, SimulatedRequest
from crosspool.simulator.exact import Progress, make_pipeline
from crosspool.simulator.group import STREAMS, SimulatedGroup, SimulatedModel
from crosspool.simulator.overlap import AlternatingGPUs, PipelineOverlap, RunningStep, SharedGPUs
from crosspool.simulator.pipeline import Pipeline, Route
from crosspool.simulator.result import GroupResult, group_result

LONGEST_RUN = 256
"""Steps taken as one at most; their stage times are those of the middle one."""


@dataclass(slots=True)
class _Run:
    """A lane's present step and the like ones that follow. done: steps of it that have ended, with a fraction."""

    lane: int
    model: SimulatedModel
    count: int
    running: RunningStep
    step_s: float = 0.0  # beside the others
    done: float = 0.0


class StepSimulator:
    """One group, step by step."""

    def __init__(self, group: SimulatedGroup) -> None:
        self.driver = CoreDriver(group)
        self.in_flight_s = 0.0
        self._num_events = 0
        self._busy_s = [0.0] * len(group.stations)
        self._group = group
        self._models = group.by_name
        self._lone_s = {model.name: model.cost.times(decode_work(1, 0.0)).attention_s for model in group.models}
        self._runs: dict[int, _Run] = {}
        self._now = 0.0
        is_one_gpu = len(group.stations) == 1 and group.order == STREAMS  # its streams are like those of whole models
        self._has_pools = group.layout == "crosspool" and not is_one_gpu
        self._pipeline: Pipeline | None = None  # while no set of lanes lasts
        self.overlap: PipelineOverlap | AlternatingGPUs | SharedGPUs
        if self._has_pools:
            self.overlap = PipelineOverlap(lambda lanes: make_pipeline(group, lanes))
        else:  # streams of a process on each GPU, or a process for each model, between which the driver switches
            self.overlap = SharedGPUs() if group.layout == "elastic" else AlternatingGPUs()

    def run(
        self, requests: Iterable[SimulatedRequest], stop_s: float | None = None, progress: Progress | None = None
    ) -> GroupResult:
        """Run the requests, sorted by arrival, until all have ended or until `stop_s`."""
        driver = self.driver
        end_s = float("inf") if stop_s is None else stop_s
        arrivals = Arrivals(requests)
        while arrivals.next_s < float("inf") or driver.num_live:
            lane = self._advance(max(self._now, min(arrivals.next_s, driver.next_timer(self._now), end_s)))
            now = self._now
            if lane is not None:
                del self._runs[lane]
                driver.end_step(lane, now)
            elif now >= end_s:
                break
            else:
                driver.pass_time(arrivals, now)
            for step in driver.schedule(now):
                self._begin(step)
            self._set_rates()
            if progress is not None:
                progress(now)
        self._leave_pipeline()
        return group_result(
            self._group,
            driver,
            duration_s=self._now,
            num_events=self._num_events,
            busy_s=self._busy_s,
            in_flight_s=self.in_flight_s,
        )

    def _advance(self, until_s: float) -> int | None:
        """Let time pass to the end of a lane's step, or run of steps, and return the lane; None at `until_s`."""
        if self._pipeline is not None:
            lane = self._pipeline.advance(until_s)
            now = self._pipeline.now_s
            self.in_flight_s += now - self._now
            self.driver.observe(now)
            self._now = now
            return lane
        first, first_s = self._first_end()
        now = max(self._now, min(until_s, first_s))
        assert now < float("inf"), "requests are live but nothing is going to happen"
        ended = first if first_s <= now else None
        self.driver.observe(now)
        self._catch_up(now, ended)
        self._num_events += 1
        return None if ended is None else ended.lane

    def _first_end(self) -> tuple[_Run | None, float]:
        """The run that is over first, and when."""
        first, first_s = None, float("inf")
        for run in self._runs.values():
            end_s = self._now + (run.count - run.done) * run.step_s
            if end_s < first_s:
                first, first_s = run, end_s
        return first, first_s

    def _catch_up(self, now: float, ended: _Run | None) -> None:
        """Let every run progress to `now`, and tell the core of the steps that have ended; of `ended`, all but one."""
        elapsed = now - self._now
        if self._runs:
            self.in_flight_s += elapsed
        for run in self._runs.values():
            before = run.done
            run.done += elapsed / run.step_s
            self._add_busy(run, run.done - before)
            whole = run.count - 1 if run is ended else min(floor(run.done), run.count - 1)
            if whole > 0:
                first_s = self._now + (1.0 - before) * run.step_s
                self.driver.repeat(run.lane, whole, first_s, run.step_s)
                run.count -= whole
                run.done -= whole
        self._now = now

    def _add_busy(self, run: _Run, steps: float) -> None:
        times, route = run.running.times, run.running.route
        if run.running.gpus:
            for gpu in run.running.gpus:
                self._busy_s[gpu] += steps * times.step_s
        else:
            self._busy_s[route.kv] += steps * times.kv_busy_s
            self._busy_s[route.weights] += steps * times.weights_busy_s

    def _begin(self, step: StepDescriptor) -> None:
        model, header = self._models[step.header.model], step.header
        route = Route(kv=model.route.kv, weights=model.route.weights, priority=header.priority)
        work = step_work(step)
        running = RunningStep(
            times=model.cost.times(work),
            route=route,
            gpus=() if self._has_pools else model.gpus or (route.kv,),
            delay=model.cost.beside_others(work),
            model=model.name,
            is_prompt=header.phase != "decode",
            sharing=model.sharing,
            lone_s=self._lone_s[model.name],
            allowed_s=self._group.patience.allowed_s(header),
        )
        self._runs[header.lane] = _Run(header.lane, model, 1, running)
        if self._pipeline is not None:
            times = running.times.slower(self._delay(running))
            self._pipeline.start(header.lane, times, route, self._now + self._group.host_s)

    def _delay(self, running: RunningStep) -> float:
        return running.delay if len(self._runs) > 1 else 1.0

    def _set_rates(self) -> None:
        """How far each run may go, and how fast, with what is in flight now."""
        runs = list(self._runs.values())
        for run in runs:
            run.count = min(LONGEST_RUN, self.driver.num_repeats(run.lane))
        if self._has_pools and len(runs) > 1 and all(run.count == 1 for run in runs):
            self._enter_pipeline()
            return
        self._leave_pipeline()
        if not runs:
            return
        for run in runs:
            if run.count > 1:
                sequences = self.driver.core.dispatcher.lanes[run.lane].sequences
                batch = len(sequences)
                kv_tokens = sum(sequence.num_cached_tokens for sequence in sequences) + batch * (run.count + 1) / 2
                times = run.model.cost.times(decode_work(batch, kv_tokens))
                run.running = replace(run.running, times=times)
        slowdowns = self.overlap.slowdowns([run.running for run in runs])
        for run, slowdown in zip(runs, slowdowns, strict=True):
            run.step_s = run.running.times.step_s * slowdown * self._delay(run.running) + self._group.host_s

    def _enter_pipeline(self) -> None:
        """Go on layer by layer: every next step has other rows, so there is no steady state to know a rate of."""
        if self._pipeline is not None:
            return
        self._pipeline = make_pipeline(self._group, self._group.config.num_lanes)
        self._pipeline.now_s = self._now
        for run in self._runs.values():
            times = run.running.times.slower(self._delay(run.running))
            self._pipeline.start(run.lane, times, run.running.route, self._now, run.done)

    def _leave_pipeline(self) -> None:
        """Go on in runs of steps from where the layers are."""
        if self._pipeline is None:
            return
        for run in self._runs.values():
            run.done = self._pipeline.progress(run.lane)
        for station, busy_s in enumerate(self._pipeline.busy_s):
            self._busy_s[station] += busy_s
        self._num_events += self._pipeline.num_events
        self._pipeline = None


def simulate_steps(
    group: SimulatedGroup,
    requests: Iterable[SimulatedRequest],
    *,
    stop_s: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> GroupResult:
    """Run the requests, sorted by arrival, until all have ended or until `stop_s`."""
    return StepSimulator(group).run(requests, stop_s, progress)
