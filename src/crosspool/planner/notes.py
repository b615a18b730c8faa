"""What a plan assumes, and what someone should know before buying: one line each, kept in the plan."""

from collections.abc import Sequence

from crosspool.planner.deployment import PlanInput
from crosspool.planner.gpus import gpu_kind
from crosspool.planner.plan import GroupPlan, PrefillPlan
from crosspool.planner.traffic import PlannedModel, stand_ins
from crosspool.units import format_bytes


def plan_notes(
    given: PlanInput, models: Sequence[PlannedModel], groups: Sequence[GroupPlan], has_own_cost: bool
) -> tuple[str, ...]:
    """In order of weight: what may be wrong first, what is only assumed last."""
    notes = []
    for group in groups:
        if not group.reached_precision:
            width = (group.required_high_bytes - group.required_low_bytes) / 2 / max(1, group.required_bytes)
            known = f"is known to {width:.1%}, not to the {given.precision:.1%} asked for"
            told = known if width < 1 else "is as good as unknown"
            notes.append(
                f"{group.name}: P{given.quantile * 100:g} {told}: its samples are worth {group.effective_samples:,.0f} "
                "independent moments; a longer trace would tell more"
            )
        if len(group.kv_ranks) > 1 and any(model.kv_parallelism != "one" for model in group.models):
            notes.append(
                f"{group.name}: models whose caches are cut over {len(group.kv_ranks)} KV ranks take prompts in passes "
                "of 32 tokens on GPUs, so that first tokens come late; `gpus: {kv: 1}` plans without"
            )
        if group.prefill is not None:
            notes += _prefill_notes(group, group.prefill)
    notes += [
        f"{name}: the figures are those of {entry}, which stands in for it" for name, entry in stand_ins(models).items()
    ]
    if others := [model.name for model in models if not model.facts.servable]:
        notes.append(f"{', '.join(others)}: planned by numbers; no family here can serve them yet")
    for model in models:
        windowed = 1 - model.facts.visible_kv_bytes(32768) / (32768 * model.facts.kv_bytes_per_token)
        if windowed > 0.01:
            notes.append(
                f"{model.name}: layers with a sliding window are budgeted in full, as the pool keeps them; at 32768 "
                f"tokens {windowed:.0%} of the cache lies behind windows"
            )
    notes += _assumptions(given, models, has_own_cost)
    return tuple(notes)


def _prefill_notes(group: GroupPlan, prefill: PrefillPlan) -> list[str]:
    notes = []
    if prefill.in_pools:
        notes.append(
            f"{group.name}: prompts of {', '.join(prefill.in_pools)} run in the pools: their KV is cut over KV ranks, "
            "or no kernel for prompts takes their heads"
        )
    if len(group.gpus) == 1:
        notes.append(f"{group.name}: both pools share a GPU; serve with --gpus {group.num_gpus}")
    notes.append(
        f"{group.name}: service times count prompts as if they ran in the pools; on prefill ranks decode waits for none"
    )
    return notes


def _assumptions(given: PlanInput, models: Sequence[PlannedModel], has_own_cost: bool) -> list[str]:
    figures = given.figures
    notes = [
        f"assumed, not measured: runtime {format_bytes(figures.runtime_bytes)} a GPU, graphs "
        f"{format_bytes(figures.graph_bytes)} a model and decode lane, reserve {figures.reserve_fraction:.1%} of a GPU"
    ]
    has_load = [model for model in models if model.requests is not None]
    if any(not model.has_recorded_service for model in has_load):
        if has_own_cost:
            notes.append("service times: agreed between demand and the cost model given")
        elif given.service.tbt_ms is not None:
            notes.append(f"service times: {given.service.tbt_ms:g} ms between tokens, as told")
        else:
            kind = gpu_kind(given.gpus.kind)
            source = "measured" if kind.measured else "data-sheet"
            notes.append(f"service times: roofline with {source} bandwidth of {kind.name}, agreed with demand")
    if given.admission == "reserve" and any(model.entry.max_tokens is None for model in has_load):
        notes.append(
            "reserve: clients are taken to ask for exactly the output they get; set max_tokens where they do not"
        )
    if not has_load:
        notes.append(
            "no model has a load: all KV memory is the budget, and nothing is known about how often it is enough"
        )
    return notes
