"""Pictures of a plan: demand over time, its distribution, contexts by layout. Needs matplotlib."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from crosspool.planner.planner import Planned, PlannedGroup
from crosspool.planner.pool_demand import PoolDemand, demand_over_time
from crosspool.units import GiB, format_bytes

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
            figure = _distribution(pyplot, group, group.demand, planned.plan.quantile)
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
    wanted = f"P{100 * planned.plan.quantile:g}"
    axes.axhline(group.plan.required_bytes / GiB, color="black", linewidth=1, linestyle="--", label=wanted)
    axes.set(xlabel="minutes", ylabel="KV pages held, GiB", title=f"{group.plan.name}: demand over time")
    axes.margins(x=0)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _distribution(pyplot: Any, group: PlannedGroup, demand: PoolDemand, quantile: float) -> Any:
    """Which share of moments hold more than so much: on a logarithmic axis, since what counts are the rare ones."""
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    held, count = demand.samples / GiB, len(demand.samples)
    axes.step(np.append(0.0, held), 100.0 * (1.0 - np.arange(count + 1) / count), where="post")
    levels = {f"P{100 * level:g}": (level, demand.level(level)) for level in sorted({0.5, 0.95, 0.99, quantile})}
    for name, (level, level_bytes) in levels.items():
        axes.plot(level_bytes / GiB, 100.0 * (1.0 - level), "k.", clip_on=False)
        told = f"{name}: {format_bytes(round(level_bytes))}"
        axes.annotate(told, (level_bytes / GiB, 100.0 * (1.0 - level)), (6, 3), textcoords="offset points")
    budget = group.plan.budget_bytes / GiB
    if budget < 2 * held[-1]:
        axes.axvline(budget, color="tab:red", label=f"budget {budget:.1f} GiB")
        axes.legend()
    title = f"{group.plan.name}: demand at a random moment; budget {budget:.1f} GiB"
    axes.set(xlabel="KV pages held, GiB", ylabel="% of moments that hold more", title=title, yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=0.0)
    return figure


def _contexts(pyplot: Any, planned: Planned) -> Any:
    """What memory would hold of one request, which may be more than the model takes."""
    models = [model for group in planned.plan.groups for model in group.models]
    figure, axes = pyplot.subplots(figsize=(max(6, 0.5 * len(models) + 4), 4), layout="constrained")
    places = np.arange(len(models))
    for offset, result in enumerate(planned.plan.layouts):
        tokens = [result.seen_tokens.get(model.name, 0) / 1e3 for model in models]
        axes.bar(places + 0.27 * (offset - 1), tokens, 0.26, label=result.layout)
    limits = [model.max_context_tokens / 1e3 for model in models]
    axes.hlines(limits, places - 0.42, places + 0.42, color="black", linewidth=1.5, label="the model's own limit")
    axes.set_xticks(places, [model.name for model in models], rotation=30, ha="right")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(ylabel="1,000 tokens", title="Memory for one request, by layout")
    axes.legend()
    return figure
