"""From a split and its demand to the plan of one group: page budget, floors, ceilings, contexts."""

from collections.abc import Sequence

import numpy as np

from crosspool.planner.demand import ModelLoad
from crosspool.planner.group import Split
from crosspool.planner.parallelism import kv_parallelism
from crosspool.planner.plan import GroupPlan, ModelPlan
from crosspool.planner.pool_demand import PoolDemand
from crosspool.planner.traffic import PlannedModel
from crosspool.units import ceil_div, format_bytes

FLOORS_SHARE = 0.1
"""Default floors may keep at most this part of the budget; beyond it there are none."""


def check_contexts(models: Sequence[PlannedModel], split: Split) -> tuple[str, int] | None:
    """The first guaranteed context that the split cannot hold: a message, and the KV bytes it takes. None: all fit."""
    floors = floor_frames(models, split)
    for model in models:
        seen = seen_tokens(model, split, sum(floors.values()) - floors[model.name])
        if seen < model.entry.context:
            needed = ceil_div(model.entry.context, model.geometry.page_tokens) * model.geometry.page_bytes
            return (
                f"{model.name} is guaranteed {model.entry.context} tokens ({format_bytes(needed)} of KV), but one "
                f"request of it sees {seen} tokens",
                needed + model.facts.state_bytes + (sum(floors.values()) - floors[model.name]) * split.frame_bytes,
            )
    return None


def floor_frames(models: Sequence[PlannedModel], split: Split) -> dict[str, int]:
    """Frames kept for each model: as told, or one median request; defaults fall to 0 where they take too much.

    Raises ValueError where told floors exceed the budget.
    """
    told = {
        model.name: (model.entry.floor or 0) * model.geometry.frames_per_page
        for model in models
        if model.entry.floor is not None
    }
    if sum(told.values()) > split.usable_frames:
        raise ValueError(
            f"floors take {format_bytes(sum(told.values()) * split.frame_bytes)}, the KV pool has "
            f"{format_bytes(split.budget_bytes)}; lower `floor` of some models"
        )
    default = {model.name: _median_frames(model) for model in models if model.name not in told}
    if sum(default.values()) > FLOORS_SHARE * split.usable_frames:
        default = dict.fromkeys(default, 0)
    frames = told | default
    return {model.name: frames[model.name] for model in models}


def seen_tokens(model: PlannedModel, split: Split, others_floor_frames: int) -> int:
    """Tokens one request can hold with the pool otherwise empty but for the others' floors."""
    frames = split.usable_frames - others_floor_frames
    if kv_parallelism(model.facts, len(split.kv_ranks), model.entry.kv_parallelism) == "one":
        frames = split.kv_frames - 1 - ceil_div(others_floor_frames, len(split.kv_ranks))
    frames -= ceil_div(model.facts.state_bytes, split.frame_bytes)
    return max(0, frames // model.geometry.frames_per_page * model.geometry.page_tokens)


def build_group(
    models: Sequence[PlannedModel],
    split: Split,
    loads: Sequence[ModelLoad],
    demand: PoolDemand | None,
    step_s: float,
) -> GroupPlan:
    """The group's plan. Without a demand the whole KV memory is the budget and nothing is required."""
    floors = floor_frames(models, split)
    by_name = {load.name: load for load in loads}
    total = sum(floors.values())
    plans = [
        _model_plan(model, split, floors[model.name], total - floors[model.name], by_name.get(model.name), demand)
        for model in models
    ]
    frame = split.frame_bytes
    return GroupPlan(
        name=split.kv_ranks[0].rpartition(".")[0] or "g0",
        kv_ranks=split.kv_ranks,
        weights_ranks=split.weights_ranks,
        gpus=split.gpus,
        budget_bytes=split.budget_bytes,
        budget_bytes_per_rank=split.kv_frames * frame,
        required_bytes=round(demand.paged.value) if demand else 0,
        required_low_bytes=round(demand.paged.low) if demand else 0,
        required_high_bytes=round(demand.paged.high) if demand else 0,
        exact_quantile_bytes=round(demand.exact.value) if demand else 0,
        mean_bytes=demand.mean_bytes if demand else 0.0,
        effective_samples=demand.paged.effective_samples if demand else 0.0,
        reached_precision=demand.reached if demand else True,
        coverage=demand.covered(split.budget_bytes) if demand else 1.0,
        pooling_gain=demand.pooling_gain if demand else 1.0,
        step_s=step_s,
        models=tuple(plans),
    )


def _model_plan(
    model: PlannedModel,
    split: Split,
    floor: int,
    others_floor: int,
    load: ModelLoad | None,
    demand: PoolDemand | None,
) -> ModelPlan:
    facts, geometry = model.facts, model.geometry
    seen = seen_tokens(model, split, others_floor)
    mine = next((item for item in demand.models if item.name == model.name), None) if demand else None
    service = load.requests.mean_service_s if load else 0.0
    return ModelPlan(
        name=model.name,
        source=model.entry.model,
        servable=facts.servable,
        attention_kind=facts.attention_kind,
        kv_ranks=split.kv_ranks,
        kv_parallelism=kv_parallelism(facts, len(split.kv_ranks), model.entry.kv_parallelism),
        weights_ranks=split.weights_ranks,
        ffn_slice_bytes=split.slice_bytes[model.name],
        kv_pool_weight_bytes=facts.kv_pool_weight_bytes,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        state_bytes=facts.state_bytes,
        page_tokens=geometry.page_tokens,
        frames_per_page=geometry.frames_per_page,
        floor_pages=floor // geometry.frames_per_page,
        ceiling_pages=(split.usable_frames - others_floor) // geometry.frames_per_page,
        longest_context_tokens=min(seen, facts.max_context),
        seen_tokens=seen,
        max_context_tokens=facts.max_context,
        guaranteed_context_tokens=model.entry.context,
        rate_rps=model.rate_rps,
        mean_service_s=service,
        tbt_s=service / float(load.requests.output_tokens.mean()) if load else 0.0,
        mean_live=load.mean_live if load else 0.0,
        mean_bytes=mine.mean_bytes if mine else 0.0,
        deviation_bytes=mine.deviation_bytes if mine else 0.0,
        quantile_bytes=mine.quantile_bytes if mine else 0.0,
    )


def _median_frames(model: PlannedModel) -> int:
    if model.requests is None:
        return 0
    tokens = float(np.median(model.requests.prompt_tokens + model.requests.output_tokens))
    return max(1, ceil_div(int(tokens), model.geometry.page_tokens)) * model.geometry.frames_per_page
