"""A result, or two of them, as tables on a terminal; figures as short text."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from crosspool.bench.compare import FEWEST_REQUESTS, Difference
from crosspool.bench.result import ALL


def cell(estimate: Mapping[str, float], *, with_interval: bool = True) -> str:
    if not with_interval:
        return number(estimate["value"])
    return f"{number(estimate['value'])} ({number(estimate['low'])}-{number(estimate['high'])})"


def number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def shown_models(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Figures by model, `all` first where there are several."""
    models = dict(result["models"])
    if len(models) == 2:
        del models[ALL]
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
        rate = sum(rates.values()) if name == ALL else rates.get(name, 0.0)
        row = [name, f"{rate:.2f}" if rate else "", str(figures["completed"])]
        row += [str(figures["refused"]), str(figures["failed"]), number(figures["output_throughput"])]
        row += [f"{100 * figures['goodput_share']:.1f}"] if has_goodput else []
        if has_queues:
            queue = figures["server_queue"]
            row += [number(queue[f"{level}_ms"]) for level in ("p50", "p99")] if queue else ["", ""]
        rows.append(row)
    return header, rows


SHOWN = (("ttft_ms", "TTFT"), ("tbt_ms", "TBT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E"))
SLOW_CLIENT_MS = 5.0
TOGETHER = 1.02
"""Tokens an event, above which it is said that they come together."""
WIDE_COLUMNS = 120


def show_result(result: Mapping[str, Any], console: Console) -> None:
    """Milliseconds; where the terminal is wide enough, the interval of each percentile behind it."""
    for line in headline(result):
        console.print(line, highlight=False, soft_wrap=True)
    _show(counts_table(result), console)
    console.print()
    levels = percentile_names(result)
    is_wide = console.width >= WIDE_COLUMNS
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "ms", "mean", *levels, "max"):
        table.add_column(column, justify="left" if column in ("model", "ms") else "right")
    for name, figures in shown_models(result).items():
        shown = name
        for metric, title in SHOWN:
            if metric in figures:
                cells = [cell(figures[metric][level], with_interval=is_wide) for level in levels]
                row = (shown, title, number(figures[metric]["mean"]), *cells, number(figures[metric]["max"]))
                table.add_row(*row)
                shown = ""
    if levels:
        console.print(table)
    for line in remarks(result):
        console.print(line, highlight=False, soft_wrap=True)


def _show(found: tuple[Sequence[str], Sequence[Sequence[str]]], console: Console) -> None:
    header, rows = found
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(header):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_differences(found: Sequence[Difference], unlike: Sequence[str], console: Console) -> None:
    """unlike: in what the two loads differ."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "metric", "first", "second", "second / first", "second is"):
        table.add_column(column, justify="left" if column in ("model", "metric", "second is") else "right")
    colours = {"better": "green", "worse": "red", "same": "dim", "": ""}
    for item in found:
        ratio = "" if item.ratio is None else f"{item.ratio:.2f}"
        values = (number(item.first), number(item.second), ratio, item.verdict)
        table.add_row(item.model, item.metric, *values, style=colours[item.verdict])
    console.print(table)
    note = f"same: the 95 % intervals overlap; no word: fewer than {FEWEST_REQUESTS} requests, or no interval"
    console.print(note, style="dim", highlight=False)
    if unlike:
        console.print(f"warning: not the same load: {'; '.join(unlike)}", style="yellow", highlight=False)


def headline(result: Mapping[str, Any]) -> list[str]:
    """What was run and how much of it was served."""
    lines = [
        f"{result['completed']} of {result['num_prompts']} requests served in {result['duration']:.1f} s, "
        f"{result['refused']} refused, {result['failed']} failed",
        f"{result['output_throughput']:.1f} output tokens/s, {result['total_token_throughput']:.1f} with prompts, "
        f"at most {result['max_concurrent_requests']} requests at once",
    ]
    if result["goodput_share"] is not None:
        lines.append(
            f"{100 * result['goodput_share']:.1f} % keep {result.get('goodput_limits', 'the limits')} ms: "
            f"{result['request_goodput']:.2f} requests/s"
        )
    return lines


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What the client added, what TBT means where tokens come together, and failures."""
    client = result["client"]
    lag, late = client["loop_lag_p99_ms"], client["late_p99_ms"]
    lines = [
        f"client: requests {late:.2f} ms late and its loop {lag:.2f} ms late (P99), "
        f"{100 * client['cpu_share']:.0f} % of a core in each of {client['num_processes']} process(es)"
    ]
    if max(lag, late) > SLOW_CLIENT_MS:
        lines.append(
            f"warning: the client itself was more than {SLOW_CLIENT_MS:g} ms late; "
            "use more --client-processes or a quieter machine"
        )
    together = [
        f"{name} {per_event:.2f}"
        for name, figures in result["models"].items()
        if name != ALL and (per_event := figures["tokens_per_event"] or 0.0) > TOGETHER
    ]
    if together:
        lines.append(f"tokens come together ({', '.join(together)} an event): TBT is the time between events")
    lines += [f"{count} not served: {text}" for text, count in result["failures"].items()]
    return lines


def percentile_names(result: Mapping[str, Any]) -> list[str]:
    figures = result["models"][ALL]
    first: dict[str, Any] = next((figures[metric] for metric, _ in SHOWN if metric in figures), {})
    return [key for key, value in first.items() if isinstance(value, dict)]
