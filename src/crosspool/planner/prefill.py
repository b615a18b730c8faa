"""Prefill ranks of a group: whole models in host memory, some of them in place on GPUs of their own."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from crosspool.deployment.prefill_room import default_room, has_prompt_kernels
from crosspool.errors import CapacityError
from crosspool.models.whole_size import whole_bytes
from crosspool.planner.deployment import GPUs
from crosspool.planner.facts import ModelFacts
from crosspool.planner.memory import MemoryFigures, StepBounds, fill_gpu, prefill_rank_parts
from crosspool.planner.plan import ModelPlan, PrefillPlan, WholeModel
from crosspool.scheduler.residency import SWITCH_BYTES_PER_S
from crosspool.units import ceil_div, format_bytes


def plan_prefill(
    models: Sequence[ModelPlan],
    facts: Mapping[str, ModelFacts],
    gpus: GPUs,
    bounds: StepBounds,
    figures: MemoryFigures,
    prefix: str = "",
) -> PrefillPlan | None:
    """What each prefill rank of a group holds, as `crosspool serve` takes it; None where prompts run in the pools.

    Raises CapacityError, with the numbers, for a model that a GPU has no room for, and for more than the host holds.
    """
    if not gpus.prefill:
        return None
    own = [model for model in models if runs_on_prefill_ranks(model, facts[model.name])]
    if not own:
        names = ", ".join(model.name for model in models)
        raise CapacityError(
            f"gpus.prefill is {gpus.prefill}, and {names} cannot use them: KV is cut over KV ranks, or heads are none "
            "that the kernels for prompts take; plan with `kv: 1`, or without prefill"
        )
    whole = tuple(_whole(model, facts[model.name]) for model in own)
    parts = {
        **prefill_rank_parts(
            [facts[model.name] for model in own], _cache_bytes(own, facts), bounds, figures, _homes(own)
        ),
        "in_use_by_others": gpus.used,
        "reserve": int(gpus.memory_bytes * figures.reserve_fraction),
    }
    left = gpus.memory_bytes - sum(parts.values())
    room = _room(gpus, whole, left)
    ranks = tuple(f"{prefix}p{index}" for index in range(gpus.prefill))
    host = sum(model.whole_bytes for model in whole)
    if gpus.host_memory is not None and host * gpus.prefill > gpus.host_memory:
        raise CapacityError(
            f"each of {gpus.prefill} prefill ranks keeps {format_bytes(host)} of whole models in host memory, and "
            f"gpus.host_memory is {format_bytes(gpus.host_memory)}; plan fewer models, or without prefill"
        )
    sizes = sorted((model.whole_bytes for model in whole), reverse=True)
    return PrefillPlan(
        ranks=ranks,
        gpus=tuple(fill_gpu(rank, gpus.memory_bytes, {"whole_models": room, **parts}) for rank in ranks),
        room_bytes=room,
        host_bytes=host,
        num_in_place=sum(total <= room for total in accumulate(sizes)),
        models=whole,
        in_pools=tuple(model.name for model in models if model not in own),
    )


def runs_on_prefill_ranks(model: ModelPlan, facts: ModelFacts) -> bool:
    """Whether they can hand over its KV: a page lies whole on one KV rank, and kernels take its heads."""
    return model.servable and model.kv_parallelism == "one" and has_prompt_kernels(facts.spec)


def _whole(model: ModelPlan, facts: ModelFacts) -> WholeModel:
    size = whole_bytes(facts.spec)
    return WholeModel(name=model.name, whole_bytes=size, switch_s=size / SWITCH_BYTES_PER_S)


def _homes(models: Sequence[ModelPlan]) -> int:
    return len({rank for model in models for rank in model.kv_ranks})


def _cache_bytes(models: Sequence[ModelPlan], facts: Mapping[str, ModelFacts]) -> int:
    """One layer of the longest context, in bfloat16: a chunk goes through the layers one after another."""
    return max(
        (1 + ceil_div(model.longest_context_tokens, model.page_tokens))
        * model.page_tokens
        * 2
        * facts[model.name].spec.kv_elements_per_token_layer
        for model in models
    )


def _room(gpus: GPUs, models: Sequence[WholeModel], left: int) -> int:
    """As told; else two of the largest, or what there is."""
    largest, room, remedy = max(models, key=lambda model: model.whole_bytes), gpus.prefill_pool, "set more"
    if room is None:
        room, remedy = min(default_room([model.whole_bytes for model in models]), max(0, left)), "use larger GPUs"
    if room > left:
        raise CapacityError(
            f"gpus.prefill_pool is {format_bytes(room)}; a prefill GPU of {format_bytes(gpus.memory_bytes)} has "
            f"{format_bytes(left)} for whole models; set less"
        )
    if largest.whole_bytes > room:
        raise CapacityError(
            f"{largest.name} takes {format_bytes(largest.whole_bytes)} whole, and a prefill GPU of "
            f"{format_bytes(gpus.memory_bytes)} has {format_bytes(room)} for whole models; {remedy}, or plan without "
            "prefill"
        )
    return room
