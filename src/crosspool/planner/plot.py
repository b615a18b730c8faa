"""Pictures of a plan: demand over time, its distribution, contexts by layout. Needs matplotlib."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from crosspool.planner.planner import Planned, PlannedGroup
from crosspool.planner.pool_demand import PoolDemand, demand_over_time
from crosspool.units import GiB

MAX_NAMED = 9
"""Models with a colour of their own; the others share one."""


def check_matplotlib() -> None:
    """Raises ValueError, with the remedy, where matplotlib is not installed; asked before the work of a plan."""
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; pip install 'crosspool[plots]'")


def write_plots(planned: Planned, directory: Path) -> list[Path]:
    """PNG files in `directory`. Raises ValueError where matplotlib is missing or the folder cannot be written."""
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {directory}: {error.strerror or error}") from None
    written = []
    for group in planned.groups:
        if group.demand is not None:
            prefix = f"{group.plan.name}_" if len(planned.groups) > 1 else ""
            written.append(_save(pyplot, _over_time(pyplot, planned, group), directory / f"{prefix}demand.png"))
            figure = _distribution(pyplot, group, group.demand)
            written.append(_save(pyplot, figure, directory / f"{prefix}distribution.png"))
    written.append(_save(pyplot, _contexts(pyplot, planned), directory / "contexts.png"))
    return written


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _over_time(pyplot: Any, planned: Planned, group: PlannedGroup) -> Any:
    moments, held = demand_over_time(group.loads, planned.plan.seed)
    order = np.argsort(-held.mean(axis=1))
    names = [group.loads[idx].name for idx in order[:MAX_NAMED]]
    stacks = [held[idx] / GiB for idx in order[:MAX_NAMED]]
    if len(order) > MAX_NAMED:
        names.append(f"{len(order) - MAX_NAMED} others")
        stacks.append(held[order[MAX_NAMED:]].sum(axis=0) / GiB)
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    axes.stackplot(moments / 60.0, stacks, labels=names)
    axes.axhline(group.plan.required_bytes / GiB, color="black", linewidth=1, linestyle="--", label="required")
    axes.set(xlabel="minutes", ylabel="KV pages held, GiB", title=f"{group.plan.name}: demand over time")
    axes.legend(loc="upper right", fontsize="small")
    return figure


def _distribution(pyplot: Any, group: PlannedGroup, demand: PoolDemand) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    axes.hist(demand.samples / GiB, bins=120, color="tab:blue", alpha=0.7)
    for level in (0.5, 0.95, 0.99):
        axes.axvline(demand.level(level) / GiB, linewidth=1, linestyle=":", color="black")
        axes.text(
            demand.level(level) / GiB, axes.get_ylim()[1] * 0.95, f" P{level * 100:g}", fontsize="small", va="top"
        )
    budget = group.plan.budget_bytes / GiB
    if budget < 2 * demand.samples[-1] / GiB:
        axes.axvline(budget, color="tab:red", label=f"budget {budget:.1f} GiB")
        axes.legend()
    title = f"{group.plan.name}: demand at a random moment; budget {budget:.1f} GiB"
    axes.set(xlabel="KV pages held, GiB", ylabel="samples", title=title)
    return figure


def _contexts(pyplot: Any, planned: Planned) -> Any:
    names = [model.name for group in planned.plan.groups for model in group.models]
    figure, axes = pyplot.subplots(figsize=(max(6, 0.5 * len(names) + 4), 4), layout="constrained")
    places = np.arange(len(names))
    for offset, result in enumerate(planned.plan.layouts):
        tokens = [result.seen_tokens.get(name, 0) for name in names]
        axes.bar(places + 0.27 * (offset - 1), tokens, 0.26, label=result.layout)
    axes.set_xticks(places, names, rotation=30, ha="right")
    axes.set(ylabel="tokens one request sees", title="Longest context by layout")
    axes.legend()
    return figure
