"""A recorded day of many models on groups of GPUs: who is where, and the requests of each group.

Models are dealt over the groups by size, largest first onto the group with most room. The planner's own placement would
do it better and takes minutes; here it is the simulation that is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crosspool.planner.deployment import PlanInput
from crosspool.planner.group import Split, split_group
from crosspool.planner.traffic import PlannedModel, planned_models
from crosspool.workload.traces import read_trace


@dataclass(frozen=True, kw_only=True, slots=True)
class DayGroup:
    """Models that share one group of GPUs."""

    models: tuple[PlannedModel, ...]
    split: Split


def day_input(trace: Path, *, num_groups: int, group_size: int, num_kv: int) -> PlanInput:
    """The deployment of every model in the trace; names are catalogue names or known other names of entries."""
    names = read_trace(trace).models
    return PlanInput.model_validate(
        {
            "gpus": {"kind": "h200", "count": num_groups * group_size, "per_group": group_size, "kv": num_kv},
            "models": [{"model": name, "name": name} for name in names],
            "trace": {"file": trace, "period": 86400.0},
            "engine": {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "decode_lanes": 4},
            "admission": "forecast",
        }
    )


def day_groups(plan_input: PlanInput) -> list[DayGroup]:
    """Every model in one group. Raises CapacityError where a group does not hold its models."""
    models = planned_models(plan_input)
    dealt: list[list[PlannedModel]] = [[] for _ in range(plan_input.num_groups)]
    for model in sorted(models, key=lambda item: -item.facts.ffn_bytes):
        min(dealt, key=lambda group: sum(item.facts.ffn_bytes for item in group)).append(model)
    (num_kv,) = plan_input.kv_choices()
    return [DayGroup(models=tuple(group), split=_split(group, plan_input, num_kv)) for group in dealt if group]


def _split(models: Sequence[PlannedModel], plan_input: PlanInput, num_kv: int) -> Split:
    facts = [model.facts for model in models]
    return split_group(facts, plan_input.gpu_set, num_kv, plan_input.bounds, plan_input.figures)
