"""A saved plan beside a workload: what the plan decided is taken from it, requests come from the input."""

from collections.abc import Sequence

from crosspool.planner.catalogue import model_facts
from crosspool.planner.deployment import Engine, PlanInput
from crosspool.planner.group import Split
from crosspool.planner.memory import ffn_slice_bytes
from crosspool.planner.plan import GroupPlan, ModelPlan, Plan
from crosspool.planner.planner import Planned, PlannedGroup
from crosspool.planner.traffic import PlannedModel, planned_models
from crosspool.units import format_bytes


def with_saved_plan(plan: Plan, plan_input: PlanInput) -> tuple[Planned, PlanInput]:
    """`plan` with the requests of `plan_input`, and the input with the plan's settings in place of its own.

    Raises ValueError, in one line, where models or GPUs of the two are not the same.
    """
    _check_gpus(plan, plan_input)
    settings = _with_settings(plan, plan_input)
    models = {model.name: model for model in planned_models(settings)}
    groups = tuple(_group(plan, group, [models[item.name] for item in group.models]) for group in plan.groups)
    return Planned(plan=plan, groups=groups), settings


def _check_gpus(plan: Plan, plan_input: PlanInput) -> None:
    gpus = plan_input.gpus
    planned = f"{plan.gpu_kind} with {format_bytes(plan.gpu_memory_bytes)}"
    given = f"{gpus.kind} with {format_bytes(gpus.memory_bytes)}"
    if (plan.gpu_kind, plan.gpu_memory_bytes) != (gpus.kind, gpus.memory_bytes):
        raise ValueError(f"the plan is for GPUs {planned}, the input has {given}; plan again")
    if len(plan.groups) > plan_input.num_groups:
        raise ValueError(f"the plan has {len(plan.groups)} groups, the input {plan_input.num_groups}; plan again")
    for group in plan.groups:
        if group.num_gpus != gpus.group_size:
            raise ValueError(
                f"{group.name} of the plan has {group.num_gpus} GPUs, a group of the input {gpus.group_size}; "
                "plan again"
            )
        prefill = len(group.prefill.ranks) if group.prefill is not None else 0
        if prefill != gpus.prefill:
            raise ValueError(
                f"{group.name} of the plan has {prefill} GPUs for prefill, the input {gpus.prefill}; plan again"
            )
        if gpus.kv not in ("auto", len(group.kv_ranks)):
            raise ValueError(
                f"{group.name} of the plan has {len(group.kv_ranks)} KV GPUs, the input asks for {gpus.kv}; "
                "plan again, or leave gpus.kv out"
            )
        used = group.gpus[0].parts.get("in_use_by_others", 0)
        if used != gpus.used:
            raise ValueError(
                f"the plan leaves {format_bytes(used)} of each GPU to others, the input {format_bytes(gpus.used)}; "
                "plan again"
            )


def _with_settings(plan: Plan, plan_input: PlanInput) -> PlanInput:
    decided = {model.name: model for group in plan.groups for model in group.models}
    given = [entry.name or model_facts(entry.model).name for entry in plan_input.models]
    if missing := [name for name in given if name not in decided]:
        raise ValueError(f"{missing[0]} is in the input and not in the plan; plan again")
    if unknown := [name for name in decided if name not in given]:
        raise ValueError(f"{unknown[0]} is in the plan and not in the input; plan again")
    entries = []
    for name, entry in zip(given, plan_input.models, strict=True):
        update = {"page_tokens": decided[name].page_tokens, "kv_parallelism": decided[name].kv_parallelism}
        entries.append(entry.model_copy(update=update))
    engine = Engine(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        decode_lanes=plan.num_decode_lanes,
        prefill_lanes=plan.num_prefill_lanes,
        frame_bytes=plan.frame_bytes,
    )
    return plan_input.model_copy(update={"engine": engine, "admission": plan.admission, "models": entries})


def _group(plan: Plan, group: GroupPlan, models: Sequence[PlannedModel]) -> PlannedGroup:
    for model in models:
        _check_model(group.model(model.name), model)
    split = Split(
        kv_ranks=group.kv_ranks,
        weights_ranks=group.weights_ranks,
        gpus=group.gpus,
        kv_frames=group.budget_bytes_per_rank // plan.frame_bytes,
        frame_bytes=plan.frame_bytes,
        slice_bytes={model.name: model.ffn_slice_bytes for model in group.models},
    )
    return PlannedGroup(models=tuple(models), split=split, loads=(), demand=None, plan=group)


def _check_model(planned: ModelPlan, model: PlannedModel) -> None:
    """The same name may stand for another checkpoint by now; its sizes tell."""
    facts = model.facts
    sizes = {
        "KV bytes per token": (planned.kv_bytes_per_token, facts.kv_bytes_per_token),
        "bytes of state": (planned.state_bytes, facts.state_bytes),
        "frames per page": (planned.frames_per_page, model.geometry.frames_per_page),
        "bytes beside the FFNs": (planned.kv_pool_weight_bytes, facts.kv_pool_weight_bytes),
        "bytes of FFN": (sum(planned.ffn_slice_bytes), sum(ffn_slice_bytes(facts, planned.tp_degree))),
    }
    for what, (then, now) in sizes.items():
        if then != now:
            raise ValueError(f"{planned.name} has {then:,} {what} in the plan and {now:,} in the input; plan again")
