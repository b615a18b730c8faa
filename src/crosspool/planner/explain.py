"""Why each number of a plan is what it is, in sentences with the numbers in them. Made from the plan alone."""

from collections.abc import Iterator

from crosspool.planner.plan import GroupPlan, ModelPlan, Plan, PrefillPlan
from crosspool.units import format_bytes

PARALLELISM_REASONS = {
    "one": "one rank holds a request's whole cache",
    "heads": "its KV heads divide over the ranks",
    "tokens": "its cache has no heads that the ranks could share evenly, so every n-th page lies on another rank",
}


def explain(plan: Plan) -> Iterator[str]:
    """The explanation line by line, Markdown."""
    percent = plan.quantile * 100
    yield f"# Plan: {plan.num_gpus} x {plan.gpu_kind}, {format_bytes(plan.gpu_memory_bytes)} each, P{percent:g}"
    yield ""
    if len(plan.groups) > 1:
        yield (
            f"Models were grouped by {plan.placement.method}: alike attention and FFN times together. "
            f"Objective {plan.placement.objective:.3f}, proven within {plan.placement.gap:.2%} of the best."
        )
        yield ""
    for group in plan.groups:
        yield from _group(plan, group)
    yield from _layouts(plan)
    yield "## Assumptions"
    yield ""
    yield from (f"- {note}" for note in plan.notes)


def _group(plan: Plan, group: GroupPlan) -> Iterator[str]:
    frame = format_bytes(plan.frame_bytes)
    prefill = f", {len(group.prefill.ranks)} prefill" if group.prefill is not None else ""
    yield f"## {group.name}: {len(group.kv_ranks)} KV, {len(group.weights_ranks)} weights{prefill}"
    yield ""
    yield (
        f"Of all splits that hold the weights, the demand and the guaranteed contexts, this one has the shortest step: "
        f"{group.step_s * 1e3:.2f} ms at batch 1, by bytes and bandwidth."
    )
    yield ""
    yield from _demand(plan, group)
    yield (
        f"**Budget** {format_bytes(group.budget_bytes)} of pages: what is left on {len(group.kv_ranks)} x "
        f"{format_bytes(group.budget_bytes_per_rank)}, in frames of {frame}, one of them kept back on each rank."
    )
    yield ""
    gpus = [*group.gpus, *(group.prefill.gpus if group.prefill is not None else ())]
    yield "| part | " + " | ".join(gpu.rank for gpu in gpus) + " |"
    yield "| --- |" + " ---: |" * len(gpus)
    for part in dict.fromkeys(part for gpu in gpus for part in gpu.parts):
        sizes = (format_bytes(gpu.parts.get(part, 0)) for gpu in gpus)
        yield f"| {part} | " + " | ".join(sizes) + " |"
    yield "| sum | " + " | ".join(format_bytes(sum(gpu.parts.values())) for gpu in gpus) + " |"
    yield ""
    if group.prefill is not None:
        yield from _prefill(group.prefill)
    for model in group.models:
        yield from _model(plan, model)


def prefill_line(prefill: PrefillPlan) -> str:
    """What prefill ranks hold where, in one sentence."""
    slowest = max(prefill.models, key=lambda model: model.switch_s)
    return (
        f"prompts run on {', '.join(prefill.ranks)}: {format_bytes(prefill.host_bytes)} of models in host memory for "
        f"each, {format_bytes(prefill.room_bytes)} of its GPU for those in place, {prefill.num_in_place} of the "
        f"largest at once; bringing one in takes up to {slowest.switch_s:.2f} s ({slowest.name})"
    )


def _prefill(prefill: PrefillPlan) -> Iterator[str]:
    yield f"**Prefill**: {prefill_line(prefill)}."
    yield ""
    yield "| whole model | bytes | brought in |"
    yield "| --- | ---: | ---: |"
    for model in prefill.models:
        yield f"| {model.name} | {format_bytes(model.whole_bytes)} | {model.switch_s:.2f} s |"
    yield ""


def _demand(plan: Plan, group: GroupPlan) -> Iterator[str]:
    if not group.required_bytes and not group.mean_bytes:
        yield "No model has a load, so nothing is required; all KV memory is the budget."
        yield ""
        return
    percent = plan.quantile * 100
    held = "reserved (prompt + max_tokens)" if plan.admission == "reserve" else "live (prompt + what is decoded)"
    yield (
        f"**Demand**, {held}: mean {format_bytes(group.mean_bytes)}; P{percent:g} {format_bytes(group.required_bytes)} "
        f"in whole pages, {format_bytes(group.exact_quantile_bytes)} counted by tokens. With {plan.confidence:.0%} "
        f"confidence it lies in {format_bytes(group.required_low_bytes)} .. {format_bytes(group.required_high_bytes)} "
        f"({group.effective_samples:,.0f} independent moments). The budget is enough for {group.coverage:.3%} of "
        f"moments. Alone, the models' P{percent:g} add up to {group.pooling_gain:.2f} times that."
    )
    yield ""


def _model(plan: Plan, model: ModelPlan) -> Iterator[str]:
    page = model.frames_per_page * plan.frame_bytes
    yield f"### {model.name}"
    yield ""
    yield (
        f"- cache: {model.attention_kind}, {model.kv_bytes_per_token:,} bytes a token; a page is {model.page_tokens} "
        f"tokens in {model.frames_per_page} frames ({format_bytes(page)}), "
        f"{model.page_tokens * model.kv_bytes_per_token / page:.1%} filled"
    )
    if model.state_bytes:
        yield f"- each request also holds {format_bytes(model.state_bytes)} of state, whatever its length"
    yield f"- KV parallelism {model.kv_parallelism}: {PARALLELISM_REASONS[model.kv_parallelism]}"
    yield (
        f"- FFN {format_bytes(sum(model.ffn_slice_bytes))} over {model.tp_degree} weights ranks, cut along the "
        f"intermediate width: {', '.join(format_bytes(size) for size in model.ffn_slice_bytes)}; everything else, "
        f"{format_bytes(model.kv_pool_weight_bytes)}, on each KV rank"
    )
    if model.mean_live:
        yield (
            f"- load: {model.rate_rps:g} requests/s that stay {model.mean_service_s:.2f} s "
            f"({model.tbt_s * 1e3:.2f} ms an output token) are {model.mean_live:.2f} at once; mean "
            f"{format_bytes(model.mean_bytes)}, deviation {format_bytes(model.deviation_bytes)}, alone "
            f"P{plan.quantile * 100:g} {format_bytes(model.quantile_bytes)}"
        )
    limit = "its own limit" if model.seen_tokens >= model.max_context_tokens else "all the pool has beside other floors"
    yield (
        f"- longest context {model.longest_context_tokens:,} tokens: {limit} (own limit {model.max_context_tokens:,}, "
        f"the pool holds {model.seen_tokens:,} of one request)"
    )
    yield f"- floor {model.floor_pages} pages, ceiling {model.ceiling_pages:,} (all but the others' floors)"
    yield ""


def _layouts(plan: Plan) -> Iterator[str]:
    names = [model.name for group in plan.groups for model in group.models]
    yield "## One request sees, on the same GPUs"
    yield ""
    yield "| layout | KV in all | " + " | ".join(names) + " |"
    yield "| --- | ---: |" + " ---: |" * len(names)
    for result in plan.layouts:
        seen = " | ".join(f"{result.seen_tokens.get(name, 0):,}" for name in names)
        yield f"| {result.layout} | {format_bytes(result.kv_bytes) if result.fits else result.note} | {seen} |"
    yield ""
