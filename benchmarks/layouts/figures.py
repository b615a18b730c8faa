"""Figures of one layout's load, and ratios between layouts, under their published names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.layouts.server import num_gpus
from benchmarks.report import Report


def add_load(report: Report, layout: str, rate: str, result: Mapping[str, Any]) -> None:
    for model, figures in result["models"].items():
        if model != "all" and "tbt_ms" in figures:
            for level in ("p50", "p95", "p99"):
                estimate = figures["tbt_ms"][level]
                note = f"{estimate['low']:.3g} to {estimate['high']:.3g}"
                report.metric(f"tbt_ms.{layout}.{model}.{rate}.{level}", estimate["value"], note=note)
    for level, estimate in result["models"]["all"].get("ttft_ms", {}).items():  # none where nothing was served
        if level in ("p50", "p99"):
            report.metric(f"ttft_ms.{layout}.all.{rate}.{level}", estimate["value"])
    report.metric(f"tokens_per_s.{layout}.{rate}", result["output_throughput"])
    report.metric(f"served.{layout}.{rate}", result["completed"] / result["num_prompts"])
    report.metric(f"client_loop_lag_ms.{layout}.{rate}.p99", result["client"]["loop_lag_p99_ms"])


def add_layout_ratios(
    report: Report,
    models: Sequence[str],
    rates: Sequence[str],
    theirs: Sequence[str] = ("static-1", "elastic-1", "static-2", "elastic-2", "static-4", "elastic-4"),
    unlike: Callable[[str, str, str], str] = lambda rate, ours, theirs: "",
) -> None:
    """Each of our measured layouts beside the baselines `theirs` on as many GPUs.

    <kind>_over_<ours>.<model>.<rate>: their P99 of TBT over ours (crosspool for crosspool-1+1 and crosspool-1).
    tokens_over_<kind>.<ours>.<rate>, ttft_over_<kind>.<ours>.<rate>: ours over theirs. unlike: given
    a rate and two layouts, what else differs between their runs.
    """
    served = (name.removeprefix("served.") for name in report.metrics if name.startswith("served.crosspool"))
    measured = [(name[: -len(rate) - 1], rate) for name in list(served) for rate in rates if name.endswith(f".{rate}")]
    for ours, rate in measured:
        short = "crosspool" if ours in ("crosspool-1+1", "crosspool-1") else ours
        for layout in theirs:
            kind = layout.partition("-")[0]
            if f"served.{layout}.{rate}" not in report.metrics or num_gpus(layout) != num_gpus(ours):
                continue
            told = unlike(rate, ours, layout)

            def add(name: str, over: str, under: str, what: str, told: str = told) -> None:
                if over in report.metrics and report.metrics.get(under):
                    first, second = report.metrics[over], report.metrics[under]
                    words = f"{what} {first:.4g} over {second:.4g}"
                    report.metric(name, first / second, note=f"{words}; {told}" if told else words)

            for model in models:
                over, under = (f"tbt_ms.{which}.{model}.{rate}.p99" for which in (layout, ours))
                add(f"{kind}_over_{short}.{model}.{rate}", over, under, "P99 of TBT in ms,")
            over, under = (f"tokens_per_s.{which}.{rate}" for which in (ours, layout))
            add(f"tokens_over_{kind}.{ours}.{rate}", over, under, "output tokens/s, ours")
            over, under = (f"ttft_ms.{which}.all.{rate}.p50" for which in (ours, layout))
            add(f"ttft_over_{kind}.{ours}.{rate}", over, under, "P50 of TTFT in ms, ours")
