"""Draws the figures of docs/concepts/planned-examples.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.planning.cases import (
    ENGINE_SHARE,
    H200_COUNTS,
    PAPER,
    RATES,
    admitted,
    h200_demand,
    h200_layouts,
    pooling_gains,
)
from benchmarks.planning.contexts import BINS
from crosspool.units import GiB


def figures(folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for panel, share in zip(axes, (None, ENGINE_SHARE), strict=True):
        for layout, percents in admitted(1, share).items():
            panel.plot(range(len(BINS)), percents, marker="o", label=layout)
        panel.set_xticks(range(len(BINS)), [f"{low}-{high}K" for low, high in BINS])
        kept = "the same kept back in all layouts" if share is None else "15 % kept back with weights and KV together"
        panel.set(xlabel="prompt tokens", title=kept)
    axes[0].set(ylabel="% of requests admitted")
    axes[0].legend()
    figure.savefig(folder / "planner_contexts.svg")
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for label, cv in (("Poisson", 1.0), ("bursts, cv 4", 4.0)):
        gains = pooling_gains(cv)
        axes.plot([gain[0] for gain in gains], [gain[2] for gain in gains], marker="o", label=label)
    axes.set(xscale="log", xlabel="models", ylabel="sum of P99 over P99 of the sum")
    axes.legend()
    figure.savefig(folder / "planner_pooling_gain.svg")
    _h200_figure(pyplot).savefig(folder / "planner_h200.svg")
    print(f"wrote planner_contexts.svg, planner_pooling_gain.svg and planner_h200.svg to {folder}")


def _h200_figure(pyplot: Any) -> Any:
    """What one request of each model sees by layout, and the P99 of demand by traffic, on 2, 4 and 8 H200s."""
    figure, (contexts, demand) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained", width_ratios=(3, 2))
    results = list(h200_layouts())
    places = range(len(results))
    for offset, model in zip((-0.25, 0.0, 0.25), PAPER, strict=True):
        tokens = [result.seen_tokens[model] / 1e6 for _, _, result in results]
        contexts.bar([place + offset for place in places], tokens, width=0.25, label=model)
    contexts.set_xticks(places, [f"{count} x\n{name}" for count, name, _ in results], rotation=90, fontsize=8)
    contexts.set(ylabel="million tokens one request sees", title="Longest context by layout, H200", yscale="log")
    contexts.legend(fontsize=8)
    for traffic, rates in RATES.items():
        for rate in rates:
            p99 = [h200_demand(count, traffic, rate).required_bytes / GiB for count in H200_COUNTS]
            demand.plot(range(len(H200_COUNTS)), p99, marker="o", label=f"{traffic}, {rate:g} requests/s a model")
    demand.set_xticks(range(len(H200_COUNTS)), [f"{count} x H200" for count in H200_COUNTS])
    demand.set(ylabel="GiB", title="P99 of live KV by traffic", yscale="log")
    demand.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return figure
