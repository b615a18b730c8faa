"""What became of each model's requests, as a table of a few columns: for terminals and for reports."""

from collections.abc import Mapping
from typing import Any

from crosspool.bench.numbers import number


def shown_models(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Figures by model, `all` first where there are several."""
    models = dict(result["models"])
    if len(models) == 2:
        del models["all"]
    return models


def counts_table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows. Goodput and queueing are left out where nothing is known of them.

    ~: from a histogram, so no better than its buckets.
    """
    has_goodput = result["goodput_share"] is not None
    has_queues = any(figures["server_queue"] for figures in result["models"].values())
    header = ["model", "sent/s", "served", "refused", "failed", "tokens/s"]
    header += ["good %"] if has_goodput else []
    header += ["queued ms ~p50", "~p99"] if has_queues else []
    rates = result["realised_rates"]
    rows = []
    for name, figures in shown_models(result).items():
        rate = sum(rates.values()) if name == "all" else rates.get(name, 0.0)
        row = [name, f"{rate:.2f}" if rate else "", str(figures["completed"])]
        row += [str(figures["refused"]), str(figures["failed"]), number(figures["output_throughput"])]
        row += [f"{100 * figures['goodput_share']:.1f}"] if has_goodput else []
        if has_queues:
            queue = figures["server_queue"]
            row += [number(queue[f"{level}_ms"]) for level in ("p50", "p99")] if queue else ["", ""]
        rows.append(row)
    return header, rows
