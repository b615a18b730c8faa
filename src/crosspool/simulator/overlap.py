"""How much lanes slow each other down: from the layer-exact pipeline in a steady state, remembered.

Steps of several lanes that go round together settle into a periodic pattern. The pattern of a set of lanes is run once
in the layer-exact pipeline; its slowdowns are kept under the stage times, rounded on a logarithmic grid and taken
relative to each other, since all times alike faster or slower make no difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

from crosspool.planner.roofline import StageTimes
from crosspool.simulator.pipeline import Pipeline, Route
from crosspool.simulator.sharing import USUAL, Sharing

GRID, COARSE_GRID = 24, 8
"""Grid points per factor e: stage times are rounded by at most 2.1 %, crossings and tails by 6.5 %."""
BESIDE_GRID = 64
"""Parts of the FFN's time by which its share beside attention is counted."""

WARM_STEPS, MEASURED_STEPS = 1, 2
MAX_EVENTS = 3000


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step in flight: its stage times with nobody else there, and where it runs.

    delay: by how much each segment takes longer with others in flight, beyond waiting for its turn. Where models lie
    whole on a GPU, whose step it is: model, is_prompt; sharing: what decode and prompts cost each other; lone_s: a
    layer's attention of one row, which leaves others most of the GPU; allowed_s: what a chunk's layer may take for FFN.
    """

    times: StageTimes
    route: Route
    gpus: tuple[int, ...] = ()
    delay: float = 1.0
    model: str = ""
    is_prompt: bool = False
    sharing: Sharing = USUAL
    lone_s: float = 0.0
    allowed_s: float = float("inf")

    @property
    def layer_s(self) -> float:
        """One layer's part of the step, head included."""
        return self.times.step_s / self.times.num_layers

    def slower_beside_decode(self, num_models: int = 1) -> float:
        """Of a chunk: by how much, where it has a GPU for one part of the time in `num_models`."""
        times = self.times.slower(num_models)
        if self.allowed_s == float("inf"):
            return num_models * self.sharing.prompt_slower
        return self.sharing.prompt(times, self.allowed_s).step_s / self.times.step_s


class _Cell(NamedTuple):
    """A step on the grid by which slowdowns are remembered. The four times are logarithms, in points of GRID."""

    attention: int
    ffn: int
    crossing: int
    tail: int
    num_layers: int
    kv: int
    weights: int
    priority: int
    beside: int  # of the FFN's time, in parts of BESIDE_GRID

    @classmethod
    def of(cls, step: RunningStep) -> "_Cell":
        times, route = step.times, step.route
        return cls(
            _index(times.attention_s),
            _index(times.ffn_s),
            _index(times.crossing_s, COARSE_GRID),
            _index(times.tail_s, COARSE_GRID),
            times.num_layers,
            route.kv,
            route.weights,
            route.priority,
            round(BESIDE_GRID * times.beside_s / times.ffn_s) if times.ffn_s else 0,
        )

    def from_origin(self, origin: int) -> "_Cell":
        """With its times counted from another point."""
        attention, ffn, crossing, tail, *rest = self
        return _Cell(attention - origin, ffn - origin, crossing - origin, tail - origin, *rest)

    def times(self) -> StageTimes:
        """Of the middle of the cell; all of them in units of the origin's."""
        attention, ffn, crossing, tail = (exp(index / GRID) for index in self[:4])
        return StageTimes(
            num_layers=self.num_layers,
            attention_s=attention,
            ffn_s=ffn,
            crossing_s=crossing,
            tail_s=tail,
            beside_s=self.beside * ffn / BESIDE_GRID,
        )


class PipelineOverlap:
    """Slowdowns of lanes between stations. make_pipeline: given the number of lanes, the pipeline to ask."""

    def __init__(self, make_pipeline: Callable[[int], Pipeline]) -> None:
        self._make_pipeline = make_pipeline
        self._known: dict[tuple[_Cell, ...], list[float]] = {}

    @property
    def num_known(self) -> int:
        return len(self._known)

    def slowdowns(self, running: Sequence[RunningStep]) -> list[float]:
        """For each step, its time beside the others over its time alone; at least 1."""
        if len(running) == 1:
            return [1.0]
        cells = [_Cell.of(step) for step in running]
        key = tuple([cell.from_origin(cells[0].attention) for cell in cells])
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._measure(key)
        return known

    def _measure(self, cells: tuple[_Cell, ...]) -> list[float]:
        times = [cell.times() for cell in cells]
        routes = [Route(kv=cell.kv, weights=cell.weights, priority=cell.priority) for cell in cells]
        pipeline = self._make_pipeline(len(cells))
        for index, (step, route) in enumerate(zip(times, routes, strict=True)):
            pipeline.start(index, step, route, 0.0)
        ended = [0] * len(cells)
        begun_s, begun = 0.0, [0.0] * len(cells)
        goal = WARM_STEPS
        while True:
            lane = pipeline.advance(float("inf"))
            assert lane is not None
            ended[lane] += 1
            pipeline.start(lane, times[lane], routes[lane], pipeline.now_s)
            if min(ended) < goal and pipeline.num_events < (MAX_EVENTS if begun_s else MAX_EVENTS // 4):
                continue
            done = [count + pipeline.progress(other) for other, count in enumerate(ended)]
            if not begun_s:
                begun_s, begun, goal = pipeline.now_s, done, min(ended) + MEASURED_STEPS
                continue
            elapsed = pipeline.now_s - begun_s
            return [
                max(1.0, elapsed / max(1e-3, after - before) / step.step_s)
                for before, after, step in zip(begun, done, times, strict=True)
            ]


class SharedGPUs:
    """Slowdowns of whole models in processes of their own, between which a GPU's driver switches: equal parts of the
    time for every model with work there, and a tensor-parallel step is as slow as on its busiest GPU. A model's own
    prompts cost its decode what they cost it in two pools.
    """

    def slowdowns(self, running: Sequence[RunningStep]) -> list[float]:
        return [max(self._slowdown(step, gpu, running) for gpu in step.gpus) for step in running]

    def _slowdown(self, step: RunningStep, gpu: int, running: Sequence[RunningStep]) -> float:
        here = [other for other in running if gpu in other.gpus]
        num_models = len({other.model for other in here})
        own = [other for other in here if other.model == step.model]
        num_prompts = sum(other.is_prompt for other in own)
        if step.is_prompt:
            return num_prompts * (step.slower_beside_decode(num_models) if num_prompts < len(own) else num_models)
        return num_models * (1.0 + (step.sharing.longer_s / step.layer_s if num_prompts else 0.0))


class AlternatingGPUs:
    """Slowdowns of whole models that share a GPU as streams of one process: their kernels alternate, layer by layer.

    So a model waits for a layer of each neighbour in each of its own, and a shallow one beside a deep one suffers more
    than by equal parts. What attention takes of a single row is latency, under which others' kernels run. Prompts,
    which have a lower priority, cost decode what they cost it in two pools, and step aside for as long as they may.
    """

    def slowdowns(self, running: Sequence[RunningStep]) -> list[float]:
        return [max(self._slowdown(step, gpu, running) for gpu in step.gpus) for step in running]

    def _slowdown(self, step: RunningStep, gpu: int, running: Sequence[RunningStep]) -> float:
        decode = [other.layer_s - other.lone_s for other in running if gpu in other.gpus and not other.is_prompt]
        num_prompts = sum(gpu in other.gpus and other.is_prompt for other in running)
        if step.is_prompt:
            return num_prompts * (step.slower_beside_decode() if decode else 1.0)
        round_s = max(step.layer_s, sum(decode))
        return (round_s + (step.sharing.longer_s if num_prompts else 0.0)) / step.layer_s


def _index(seconds: float, grid: int = GRID) -> int:
    """The nearest point of `grid`, counted in points of GRID."""
    return round(log(max(seconds, 1e-9)) * grid) * (GRID // grid)
