"""Plans whose service times and pool split come from the simulator: plan, simulate, plan again until both agree.

The simulator runs the engine's own admission, batches and lanes on modelled durations, so queueing and shared pools are
in its times. What it needs of a plan is the grouping, the split and the budget; once those stay the same, its times are
those of the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from crosspool.errors import CapacityError
from crosspool.planner.deployment import PlanInput
from crosspool.planner.plan import GroupPlan, Plan
from crosspool.planner.planner import Planned, plan_deployment
from crosspool.planner.request_table import SteadySpeed
from crosspool.planner.service import CostModel
from crosspool.planner.traffic import PlannedModel
from crosspool.simulator.measured import MeasuredTable
from crosspool.simulator.measured_files import read_measured
from crosspool.simulator.result import GroupResult
from crosspool.simulator.simulator import SimulationSettings, simulate
from crosspool.units import format_bytes

REQUESTS_OF_COLDEST = 50
SHORTEST_S, LONGEST_S = 60.0, 7200.0
MOST_TOKENS = 150_000
"""Output tokens of one simulation, some seconds of work; busy models are simulated for less time."""
MAX_ROUNDS = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulatedSplit:
    """A plan with `num_kv` KV GPUs a group, and the mean time between tokens its simulation gave."""

    num_kv: int
    tbt_s: float
    planned: Planned
    results: tuple[GroupResult, ...]


def plan_as_told(plan_input: PlanInput) -> Planned:
    """The plan by the cost model that the input names. Raises as `plan_deployment` does."""
    return plan_simulated(plan_input) if plan_input.service.cost == "simulator" else plan_deployment(plan_input)


def plan_simulated(plan_input: PlanInput) -> Planned:
    """The plan of the number of KV GPUs with the shortest simulated time between tokens; ties go to fewer.

    Raises CapacityError as `plan_deployment` does where none fits, and where groupings and times do not settle.
    """
    measured = read_measured(plan_input.service.measured) if plan_input.service.measured else None
    tried: list[SimulatedSplit] = []
    for num_kv in plan_input.kv_choices():
        gpus = plan_input.gpus.model_copy(update={"kv": num_kv if plan_input.gpus.pool_size > 1 else "auto"})
        try:
            tried.append(_agreed(plan_input.model_copy(update={"gpus": gpus}), num_kv, measured))
        except CapacityError:
            continue
    if not tried:
        return plan_deployment(plan_input)  # refuses with the numbers, or was only refused at the simulator's speeds
    best = min(tried, key=lambda split: (split.tbt_s, split.num_kv))
    found = ", ".join(f"{split.num_kv} KV {split.tbt_s * 1e3:.2f} ms" for split in tried)
    notes = [f"split by simulation, mean time between tokens: {found}"]
    plan = best.planned.plan
    notes += [_held(plan, group, result) for group, result in zip(plan.groups, best.results, strict=True)]
    return Planned(plan=replace(plan, notes=(*notes, *plan.notes)), groups=best.planned.groups)


def _held(plan: Plan, group: GroupPlan, result: GroupResult) -> str:
    """What the simulated pool held, beside what was planned. Residences are independent of load in the plan only."""
    mean = sum(average.mean for average in result.occupancy.values()) * result.frame_bytes
    level = sum(average.quantile(plan.quantile) for average in result.occupancy.values()) * result.frame_bytes
    return (
        f"{group.name}: the simulated pool held {format_bytes(mean)} on average and at most {format_bytes(level)} for "
        f"{plan.quantile:.0%} of {result.duration_s:,.0f} s; planned {format_bytes(group.required_bytes)}"
    )


def _agreed(plan_input: PlanInput, num_kv: int, measured: MeasuredTable | None) -> SimulatedSplit:
    planned = plan_deployment(plan_input)
    settings = SimulationSettings(mode="steps", duration_s=_duration_s(planned), seed=plan_input.seed)
    for _ in range(MAX_ROUNDS):
        results = simulate(planned, plan_input, settings, measured=measured)
        speeds = _speeds(planned, results)
        again = plan_deployment(plan_input, lambda kv, weights, speeds=speeds: _told(speeds))  # type: ignore[misc]
        if _grouping(again) == _grouping(planned):
            tokens = sum(result.total.tbt.count for result in results)
            total = sum(result.total.tbt.total for result in results)
            return SimulatedSplit(
                num_kv=num_kv, tbt_s=total / tokens if tokens else 0.0, planned=again, results=tuple(results)
            )
        planned = again
    raise CapacityError(f"groupings and simulated times do not settle in {MAX_ROUNDS} rounds; set per_group or gpus.kv")


def _told(speeds: Mapping[str, SteadySpeed]) -> CostModel:
    return lambda items: {item.facts.name: speeds[item.facts.name] for item in items}


def _grouping(planned: Planned) -> list[tuple[str, ...]]:
    return [tuple(model.name for model in group.models) for group in planned.groups]


def _duration_s(planned: Planned) -> float:
    """Long enough for the coldest model to be seen some times, within bounds of time and tokens."""
    loads = [load for group in planned.groups for load in group.loads if load.arrivals.rate_rps]
    if not loads:
        return SHORTEST_S
    wanted = REQUESTS_OF_COLDEST / min(load.arrivals.rate_rps for load in loads)
    tokens_per_s = sum(load.arrivals.rate_rps * float(load.requests.output_tokens.mean()) for load in loads)
    return max(SHORTEST_S, min(LONGEST_S, wanted, MOST_TOKENS / tokens_per_s))


def _speeds(planned: Planned, results: Sequence[GroupResult]) -> dict[str, SteadySpeed]:
    """Each model's speed, such that its mean residence is the simulated one; unseen models keep the plan's."""
    speeds = {}
    for group, result in zip(planned.groups, results, strict=True):
        for model in group.models:
            measures = result.models.get(model.name)
            if measures is not None and measures.request_tbt.count:
                speeds[model.name] = _fitted(model, measures.request_tbt.mean, measures.residence.mean)
            elif model.requests is not None:
                plan = group.plan.model(model.name)
                speeds[model.name] = SteadySpeed(tbt_s=plan.tbt_s)
    return speeds


def _fitted(model: PlannedModel, tbt_s: float, residence_s: float) -> SteadySpeed:
    assert model.requests is not None
    before_s = residence_s - tbt_s * float(model.requests.output_tokens.mean())
    prompt = float(model.requests.prompt_tokens.mean())
    return SteadySpeed(tbt_s=tbt_s, prefill_tokens_per_s=prompt / before_s if before_s > 0 else float("inf"))
