"""How fast requests are served decides how long they hold memory, and that how many there are: a fixed point.

The time between tokens depends on the batch, the batch on how long requests stay (Little's law), and that on the time
between tokens. A cost model (roofline, measured table, or the simulator) gives the first step; iteration does the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite

from crosspool.errors import CapacityError
from crosspool.planner.facts import ModelFacts
from crosspool.planner.gpus import GPUKind
from crosspool.planner.request_table import RequestTable, SteadySpeed
from crosspool.planner.roofline import StageTimes, stage_times

MAX_ITERATIONS = 200
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Traffic:
    """One model's requests as the cost model sees them. requests: their service times are replaced."""

    facts: ModelFacts
    rate_rps: float
    requests: RequestTable


Speeds = Mapping[str, SteadySpeed]
CostModel = Callable[[Sequence[Traffic]], Speeds]
"""From traffic at its present speeds to the speeds that such traffic would see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineCost:
    """Speeds by bytes and bandwidth, with lanes of several models sharing the two pools.

    A model alone takes its step time. With others busy, a step cannot come round faster than its own bottleneck plus
    theirs, each weighted by how much of the time that model has a request. Prefill reads the experts of a whole chunk.
    """

    kind: GPUKind
    num_kv_ranks: int
    num_weights_ranks: int
    max_num_seqs: int
    chunk_tokens: int

    def __call__(self, traffic: Sequence[Traffic]) -> Speeds:
        times = {item.facts.name: self._stage_times(item) for item in traffic}
        busy = {item.facts.name: 1 - exp(-_mean_live(item)) for item in traffic}
        speeds = {}
        for item in traffic:
            name = item.facts.name
            others = sum(busy[other] * times[other].bottleneck_s for other in times if other != name)
            chunk = stage_times(
                item.facts,
                self.kind,
                batch=self.chunk_tokens,
                context_tokens=0.0,
                num_kv_ranks=self.num_kv_ranks,
                num_weights_ranks=self.num_weights_ranks,
            )
            step = max(times[name].step_s, times[name].bottleneck_s + others)
            speeds[name] = SteadySpeed(tbt_s=step, prefill_tokens_per_s=self.chunk_tokens / (chunk.step_s + others))
        return speeds

    def _stage_times(self, item: Traffic) -> StageTimes:
        live = _mean_live(item)
        if live > self.max_num_seqs:
            raise CapacityError(
                f"{item.facts.name} would have {live:.1f} requests at once at {item.rate_rps:g} requests/s, more than "
                f"max_num_seqs {self.max_num_seqs}; its queue would grow for ever: lower the rate, raise engine: "
                "max_num_seqs, or add weights GPUs"
            )
        requests = item.requests
        held = float((requests.service_s * (requests.prompt_tokens + requests.output_tokens / 2)).mean())
        return stage_times(
            item.facts,
            self.kind,
            batch=live / max(1e-9, 1 - exp(-live)),  # of the moments at which there is one
            context_tokens=held / requests.mean_service_s,
            num_kv_ranks=self.num_kv_ranks,
            num_weights_ranks=self.num_weights_ranks,
        )


def agree(traffic: Sequence[Traffic], cost: CostModel, *, tolerance: float = TOLERANCE) -> tuple[Speeds, int]:
    """Speeds at which cost model and demand agree, and the iterations it took.

    Starts from no load, takes half steps, ends when no time between tokens moves by more than `tolerance`.
    Raises CapacityError where they do not settle: more arrives than can be served.
    """
    start = {item.facts.name: SteadySpeed(tbt_s=1e-6) for item in traffic}
    speeds: Speeds = cost(_at(traffic, start))
    for iteration in range(1, MAX_ITERATIONS + 1):
        wanted = cost(_at(traffic, speeds))
        moved = max(abs(wanted[name].tbt_s / speeds[name].tbt_s - 1) for name in speeds)
        if not isfinite(moved):
            break
        speeds = {name: _between(speeds[name], wanted[name]) for name in speeds}
        if moved <= tolerance:
            return speeds, iteration
    slowest = max(speeds, key=lambda name: speeds[name].tbt_s)
    raise CapacityError(
        f"service times do not settle: {slowest} is at {speeds[slowest].tbt_s * 1e3:.0f} ms between tokens and "
        "slowing; more arrives than can be served: lower the rates, or add GPUs"
    )


def _at(traffic: Sequence[Traffic], speeds: Speeds) -> list[Traffic]:
    return [replace(item, requests=item.requests.with_service(speeds[item.facts.name])) for item in traffic]


def _between(old: SteadySpeed, new: SteadySpeed) -> SteadySpeed:
    return replace(new, tbt_s=(old.tbt_s + new.tbt_s) / 2)


def _mean_live(item: Traffic) -> float:
    return item.rate_rps * item.requests.mean_service_s
