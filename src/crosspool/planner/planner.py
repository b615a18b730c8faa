"""The planner: groups, pools, demand, and the plan that comes out of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from crosspool.errors import CapacityError
from crosspool.planner.demand import ModelLoad, mean_bytes, variance_bytes
from crosspool.planner.deployment import PlanInput
from crosspool.planner.group import Split, smallest_set, split_group
from crosspool.planner.group_plan import build_group, check_contexts
from crosspool.planner.grouping import group_models
from crosspool.planner.layouts import compare_layouts, room_beside
from crosspool.planner.notes import plan_notes
from crosspool.planner.placement import NORMAL_P99
from crosspool.planner.plan import PLAN_VERSION, GroupPlan, LayoutResult, Placement, Plan
from crosspool.planner.pool_demand import PoolDemand, estimate_pool
from crosspool.planner.prefill import plan_prefill
from crosspool.planner.speeds import CostFactory, SpeedRule
from crosspool.planner.traffic import PlannedModel, planned_models
from crosspool.units import format_bytes

MAX_GROUPINGS = 3
"""Groupings tried: each time one group's demand turns out too high, the next leaves more room."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedGroup:
    """One group's decision with what it was made from.

    demand is None where no model has a load. A saved plan keeps neither loads nor demand: it has none of either.
    """

    models: tuple[PlannedModel, ...]
    split: Split
    loads: tuple[ModelLoad, ...]
    demand: PoolDemand | None
    plan: GroupPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """The plan, and what pictures and explanations need beside it."""

    plan: Plan
    groups: tuple[PlannedGroup, ...]


def plan_deployment(plan_input: PlanInput, cost_factory: CostFactory | None = None) -> Planned:
    """Plan one input; `cost_factory` replaces its cost model, with measured tables or the simulator.

    Raises CapacityError, with the numbers and the smallest set that can, for what does not fit; ValueError for what is
    wrong in the input.
    """
    rule = SpeedRule(plan_input=plan_input, cost_factory=cost_factory)
    models = planned_models(plan_input)
    groups, placement = _plan_groups(models, plan_input, rule)
    plans = [group.plan for group in groups]
    plan = Plan(
        version=PLAN_VERSION,
        seed=plan_input.seed,
        quantile=plan_input.quantile,
        precision=plan_input.precision,
        confidence=plan_input.confidence,
        admission=plan_input.admission,
        gpu_kind=plan_input.gpus.kind,
        gpu_memory_bytes=plan_input.gpus.memory_bytes,
        frame_bytes=plan_input.engine.frame_bytes,
        max_num_seqs=plan_input.engine.max_num_seqs,
        max_num_batched_tokens=plan_input.engine.max_num_batched_tokens,
        num_decode_lanes=plan_input.engine.decode_lanes,
        num_prefill_lanes=plan_input.engine.prefill_lanes,
        groups=tuple(plans),
        layouts=_merge([_layouts(group, plan_input) for group in groups]),
        placement=placement,
        notes=plan_notes(plan_input, models, plans, cost_factory is not None),
    )
    return Planned(plan=plan, groups=tuple(groups))


def _plan_groups(
    models: Sequence[PlannedModel], plan_input: PlanInput, rule: SpeedRule
) -> tuple[list[PlannedGroup], Placement]:
    for attempt in range(MAX_GROUPINGS):
        grouped, placement = group_models(models, plan_input, rule, NORMAL_P99 + attempt)
        try:
            groups = [
                _plan_group(members, plan_input, rule, f"g{idx}." if len(grouped) > 1 else "")
                for idx, members in enumerate(grouped)
            ]
        except CapacityError as error:
            is_demand = isinstance(error.__cause__, _TooSmallError)  # more room in the next grouping may help
            if len(grouped) == 1 or attempt == MAX_GROUPINGS - 1 or not is_demand:
                raise
            continue
        return groups, placement
    raise AssertionError("the last grouping returns or raises")


def _plan_group(models: Sequence[PlannedModel], plan_input: PlanInput, rule: SpeedRule, prefix: str) -> PlannedGroup:
    """The fastest split by roofline step times that holds weights, demand and guaranteed contexts."""
    facts = [model.facts for model in models]
    gpus, bounds, figures = plan_input.gpu_set, plan_input.bounds, plan_input.figures
    splits: list[Split] = []
    refusals: list[Exception] = []
    needed = 0
    no_prefill: CapacityError | None = None
    for num_kv in plan_input.kv_choices():
        try:
            splits.append(split_group(facts, gpus, num_kv, bounds, figures, prefix))
        except (CapacityError, ValueError) as error:
            refusals.append(error)
    speeds = [rule.step_s(models, len(split.kv_ranks), len(split.weights_ranks)) for split in splits]
    for step_s, split in sorted(zip(speeds, splits, strict=True), key=lambda item: (item[0], len(item[1].kv_ranks))):
        try:
            return _try_split(models, split, plan_input, rule, step_s)
        except _TooSmallError as error:
            refusals.insert(0, error)
            needed = max(needed, error.needed_bytes)
        except CapacityError as error:  # of prefill ranks; with fewer KV ranks they may do
            no_prefill = no_prefill or error
    if no_prefill is not None:
        raise no_prefill
    found = smallest_set(facts, gpus, bounds, figures, needed)
    remedy = "no number of these GPUs can hold it: use larger ones, or fewer models"
    if found is not None:
        remedy = f"smallest set: {found[0]} KV + {found[1]} weights GPUs"
    raise CapacityError(f"{refusals[0]}; {remedy}") from refusals[0]


def _try_split(
    models: Sequence[PlannedModel], split: Split, plan_input: PlanInput, rule: SpeedRule, step_s: float
) -> PlannedGroup:
    if missing := check_contexts(models, split):
        raise _TooSmallError(*missing)
    speeds = rule.speeds(models, len(split.kv_ranks), len(split.weights_ranks))
    loads = tuple(load for model in models if (load := model.load(plan_input.admission, speeds.get(model.name))))
    demand = _demand(loads, split, plan_input) if loads else None
    plan = build_group(models, split, loads, demand, step_s)
    facts = {model.name: model.facts for model in models}
    prefix = f"{plan.name}." if "." in split.kv_ranks[0] else ""
    prefill = plan_prefill(plan.models, facts, plan_input.gpus, plan_input.bounds, plan_input.figures, prefix)
    plan = replace(plan, prefill=prefill)
    return PlannedGroup(models=tuple(models), split=split, loads=loads, demand=demand, plan=plan)


def _demand(loads: Sequence[ModelLoad], split: Split, plan_input: PlanInput) -> PoolDemand:
    """Sampled demand; refused on the mean alone where that is too much already."""
    mean = sum(mean_bytes(load) for load in loads)
    _check_fits(mean, split, "the mean of active KV")
    demand = estimate_pool(
        loads,
        quantile=plan_input.quantile,
        precision=plan_input.precision,
        confidence=plan_input.confidence,
        seed=plan_input.seed,
    )
    deviation = sqrt(sum(variance_bytes(load) for load in loads))
    moments = f"mean {format_bytes(mean)}, deviation {format_bytes(deviation)} were arrivals Poisson"
    _check_fits(demand.paged.value, split, f"P{plan_input.quantile * 100:g} of active KV ({moments})")
    return demand


def _check_fits(needed_bytes: float, split: Split, what: str) -> None:
    if needed_bytes > split.budget_bytes:
        kv = len(split.kv_ranks)
        raise _TooSmallError(
            f"{what} is {format_bytes(needed_bytes)}; {kv} KV rank{'s' if kv > 1 else ''} "
            f"offer{'' if kv > 1 else 's'} {format_bytes(split.budget_bytes)}",
            int(needed_bytes),
        )


class _TooSmallError(CapacityError):
    """A split is too small for demand or contexts; another one may do."""

    def __init__(self, message: str, needed_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


def _layouts(group: PlannedGroup, plan_input: PlanInput) -> tuple[LayoutResult, ...]:
    """Our split beside a static partition and an elastic pool of the same GPUs, with the same memory kept back."""
    room = room_beside(group.split, group.plan.num_gpus, plan_input.gpus.memory_bytes)
    ours = LayoutResult(
        layout="crosspool",
        fits=True,
        note="",
        kv_bytes=group.split.budget_bytes,
        gpus=(*(gpu.rank for gpu in group.split.gpus), *(group.plan.prefill.ranks if group.plan.prefill else ())),
        seen_tokens={model.name: model.seen_tokens for model in group.plan.models},
    )
    demand = {model.name: model.quantile_bytes for model in group.plan.models if model.quantile_bytes}
    return (ours, *compare_layouts([model.facts for model in group.models], room, demand or None))


def _merge(groups: Sequence[tuple[LayoutResult, ...]]) -> tuple[LayoutResult, ...]:
    """One result a layout over all groups."""
    merged = []
    for results in zip(*groups, strict=True):
        notes = [result.note for result in results if result.note]
        merged.append(
            LayoutResult(
                layout=results[0].layout,
                fits=all(result.fits for result in results),
                note=notes[0] if notes else "",
                kv_bytes=sum(result.kv_bytes for result in results),
                gpus=tuple(gpu for result in results for gpu in result.gpus),
                seen_tokens={name: seen for result in results for name, seen in result.seen_tokens.items()},
            )
        )
    return tuple(merged)
