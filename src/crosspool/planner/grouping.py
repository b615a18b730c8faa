"""Models into groups: what the placement program is asked, for every number of KV GPUs a group may have."""

from collections.abc import Sequence

from crosspool.errors import CapacityError
from crosspool.planner.demand import mean_bytes, variance_bytes
from crosspool.planner.deployment import PlanInput
from crosspool.planner.memory import ffn_slice_bytes, kv_rank_parts, weights_rank_parts
from crosspool.planner.placement import Candidate, GroupRoom, place_models
from crosspool.planner.plan import Placement
from crosspool.planner.speeds import SpeedRule
from crosspool.planner.traffic import PlannedModel
from crosspool.units import ceil_div


def group_models(
    models: Sequence[PlannedModel], plan_input: PlanInput, rule: SpeedRule, deviations: float
) -> tuple[list[list[PlannedModel]], Placement]:
    """The grouping with the least spread of stage times over numbers of KV GPUs; empty groups are left out.

    Raises the first CapacityError where none fits.
    """
    num_groups = plan_input.num_groups
    if num_groups == 1:
        return [list(models)], Placement(objective=0.0, gap=0.0, method="one group")
    found: list[tuple[list[list[str]], Placement]] = []
    refusals: list[Exception] = []
    for num_kv in _powers_of_two(plan_input.kv_choices()):
        num_weights = max(1, plan_input.gpus.pool_size - num_kv)
        try:
            candidates = [_candidate(model, plan_input, rule, num_kv, num_weights) for model in models]
            room = _room(models, plan_input, num_kv, num_weights)
            found.append(place_models(candidates, room, num_groups, deviations=deviations))
        except (CapacityError, ValueError) as error:  # ValueError: a model is too narrow for so many weights ranks
            refusals.append(error)
    if not found:
        raise CapacityError(str(refusals[0]))
    names, placement = min(found, key=lambda item: item[1].objective)
    by_name = {model.name: model for model in models}
    return [[by_name[name] for name in group] for group in names if group], placement


def _powers_of_two(choices: Sequence[int]) -> list[int]:
    """Of many choices only these are worth a program each; every group's own split is searched among all of them."""
    return [choice for choice in choices if choice & (choice - 1) == 0] or list(choices)


def _candidate(model: PlannedModel, plan_input: PlanInput, rule: SpeedRule, num_kv: int, num_weights: int) -> Candidate:
    """Demand and stage times of the model as if it had a group to itself."""
    speed = rule.speeds([model], num_kv, num_weights).get(model.name)
    load = model.load(plan_input.admission, speed)
    times = rule.stages(model, load, num_kv, num_weights)
    return Candidate(
        name=model.name,
        ffn_bytes=num_weights * max(ffn_slice_bytes(model.facts, num_weights)),
        kv_pool_weight_bytes=model.facts.kv_pool_weight_bytes,
        mean_bytes=mean_bytes(load) if load is not None else 0.0,
        variance_bytes=variance_bytes(load) if load is not None else 0.0,
        attention_s=times.attention_s,
        ffn_s=times.ffn_s,
        busy=min(1.0, load.mean_live) if load is not None else 0.0,
    )


def _room(models: Sequence[PlannedModel], plan_input: PlanInput, num_kv: int, num_weights: int) -> GroupRoom:
    """What a group has left for FFNs, and for KV with its weights, beside buffers, runtime and reserve.

    Buffers are those of the widest models, graphs those of an average number of them.
    """
    facts = [model.facts for model in models]
    bounds, figures, gpus = plan_input.bounds, plan_input.figures, plan_input.gpu_set
    elsewhere = len(facts) - ceil_div(len(facts), plan_input.num_groups)
    common = gpus.used_bytes + int(gpus.memory_bytes * figures.reserve_fraction)
    common -= figures.graph_bytes * bounds.num_decode_lanes * elsewhere
    kv = kv_rank_parts(facts, bounds, figures, num_weights)
    weights = weights_rank_parts(facts, 0, bounds, figures, num_kv)
    beside_kv = sum(kv.values()) - kv["attention_weights"] + 2 * bounds.frame_bytes
    return GroupRoom(
        num_kv=num_kv,
        kv_bytes_per_rank=gpus.memory_bytes - common - beside_kv,
        num_weights=num_weights,
        weights_bytes_per_rank=gpus.memory_bytes - common - sum(weights.values()),
    )
