"""From a plan to the configuration of `crosspool serve`: budget, limits, pages, ranks, lanes, contexts as planned."""

from pathlib import Path
from typing import Any

import yaml

from crosspool.deployment.prefill_room import default_room
from crosspool.planner.catalogue import hub_id
from crosspool.planner.plan import GroupPlan, ModelPlan, Plan, PrefillPlan
from crosspool.units import ceil_div


def serve_settings(plan: Plan, group: GroupPlan) -> dict[str, Any]:
    """Settings that serve one group as planned. Raises ValueError, with the remedy, for what serve cannot run."""
    if unknown := [model.name for model in group.models if not model.servable]:
        raise ValueError(f"{group.name}: {unknown[0]} is planned by numbers, no family here serves it; plan without it")
    chunk = {} if plan.max_num_batched_tokens is None else {"max_num_batched_tokens": plan.max_num_batched_tokens}
    return {
        "models": [
            {
                "path": hub_id(model.source) or model.source,
                "name": model.name,
                "page_tokens": model.page_tokens,
                "max_model_len": model.longest_context_tokens,
                "kv_split": model.kv_parallelism,
                "kv_floor": model.floor_pages * model.frames_per_page * plan.frame_bytes // len(group.kv_ranks),
                "kv_ceiling": _ceiling_bytes(plan, group, model),
            }
            for model in group.models
        ],
        "kv_pool_bytes": group.budget_bytes_per_rank,
        "frame_bytes": plan.frame_bytes,
        "kv_ranks": len(group.kv_ranks),
        "weights_ranks": len(group.weights_ranks),
        "max_num_seqs": plan.max_num_seqs,
        **chunk,
        "decode_lanes": plan.num_decode_lanes,
        "prefill_lanes": plan.num_prefill_lanes,
        "admission": plan.admission,
        **(_prefill(group.prefill) if group.prefill is not None else {}),
    }


def _prefill(prefill: PrefillPlan) -> dict[str, Any]:
    """The room is named where serve would not take it by itself: it means something on GPUs alone."""
    own = default_room([model.whole_bytes for model in prefill.models])
    room = {"prefill_pool_bytes": prefill.room_bytes} if prefill.room_bytes != own else {}
    return {"prefill": "dedicated", "prefill_ranks": len(prefill.ranks), **room}


def _ceiling_bytes(plan: Plan, group: GroupPlan, model: ModelPlan) -> int:
    """The most that the model may hold on each KV rank."""
    total = model.ceiling_pages * model.frames_per_page * plan.frame_bytes
    if model.kv_parallelism == "one":
        return min(total, group.budget_bytes_per_rank)
    return ceil_div(total, len(group.kv_ranks))


def write_serve_configs(plan: Plan, directory: Path) -> list[Path]:
    """One YAML file a group, named after it. Raises ValueError as above, and where the folder cannot be written."""
    settings = {group.name: serve_settings(plan, group) for group in plan.groups}
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, values in settings.items():
            path = directory / f"{name}.yaml"
            path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise ValueError(f"cannot write to {directory}: {error.strerror or error}") from None
    return written
