"""The report of a simulation: JSON for machines, lines and tables for people, a Chrome trace for Perfetto."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from crosspool.simulator.measures import Distribution, ModelMeasures
from crosspool.simulator.pipeline import Span
from crosspool.simulator.result import GroupResult
from crosspool.units import format_bytes

TABLE_WIDTH = 130

SHARES = (0.5, 0.95, 0.99)


def report_dict(results: Sequence[GroupResult]) -> dict[str, Any]:
    """Everything, with plain numbers. Times in seconds, shares between 0 and 1."""
    return {"groups": [_group_dict(result) for result in results]}


def report_json(results: Sequence[GroupResult]) -> str:
    return json.dumps(report_dict(results), indent=2, allow_nan=False) + "\n"


def show_report(results: Sequence[GroupResult], console: Console) -> None:
    """One table a group, and a line on its stations and memory."""
    wide = Console(file=console.file, width=max(TABLE_WIDTH, console.width))
    for result in results:
        console.print(
            f"{result.name} ({result.layout}): {result.duration_s:,.1f} s, {result.num_steps:,} steps, "
            f"{result.num_events:,} events, {result.num_unfinished} requests unfinished",
            highlight=False,
        )
        wide.print(_table(result))
        if not result.total.num_arrived:
            console.print("- no request arrived in that time; give more --seconds, or a later --start", highlight=False)
            continue
        for index, station in enumerate(result.stations):
            console.print(f"- {station}: idle for {result.bubble_share(index):.1%} of the time with work in flight")
        for rank, average in result.occupancy.items():
            if not average.duration_s:
                continue
            frames = (average.mean, average.quantile(0.99), average.peak, result.frame_budget[rank])
            mean, high, peak, budget = (format_bytes(count * result.frame_bytes) for count in frames)
            console.print(f"- KV of {rank}: mean {mean}, P99 {high}, most {peak} of {budget}", highlight=False)
        if result.num_stalls:
            console.print(f"- rows left out of a decode step for want of a page: {result.num_stalls:,}")


def _table(result: GroupResult) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = ("model", "requests", "refused", "tokens", "queue P95", "TTFT P50", "TTFT P95", "TBT", "TBT P99")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    rows = [*result.models.items()]
    if len(rows) > 1:
        rows.append(("all", result.total))
    for name, measures in rows:
        table.add_row(
            name,
            f"{measures.num_arrived:,}",
            f"{measures.num_refused:,}",
            f"{measures.num_tokens:,}",
            _quantile(measures.queueing, 0.95),
            _quantile(measures.ttft, 0.5),
            _quantile(measures.ttft, 0.95),
            _seconds(measures.tbt.mean) if measures.tbt.count else "-",
            _quantile(measures.tbt, 0.99),
        )
    return table


def _quantile(values: Distribution, share: float) -> str:
    return _seconds(values.quantile(share)) if values.count else "-"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"


def _group_dict(result: GroupResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "layout": result.layout,
        "duration_s": result.duration_s,
        "num_events": result.num_events,
        "num_steps": result.num_steps,
        "num_stalls": result.num_stalls,
        "num_unfinished": result.num_unfinished,
        "stations": {
            name: {"busy_s": result.busy_s[index], "bubble_share": result.bubble_share(index)}
            for index, name in enumerate(result.stations)
        },
        "kv": {
            rank: {
                "budget_bytes": result.frame_budget[rank] * result.frame_bytes,
                "mean_bytes": average.mean * result.frame_bytes,
                "p99_bytes": average.quantile(0.99) * result.frame_bytes,
                "peak_bytes": average.peak * result.frame_bytes,
            }
            for rank, average in result.occupancy.items()
        },
        "models": {name: _measures_dict(measures) for name, measures in result.models.items()},
        "total": _measures_dict(result.total),
    }


def _measures_dict(measures: ModelMeasures) -> dict[str, Any]:
    return {
        "num_arrived": measures.num_arrived,
        "num_finished": measures.num_finished,
        "num_tokens": measures.num_tokens,
        "refused": dict(measures.refused),
        **{
            f"{name}_s": _distribution(getattr(measures, name))
            for name in ("ttft", "queueing", "tbt", "request_tbt", "residence")
        },
    }


def _distribution(values: Distribution) -> dict[str, float]:
    quantiles = {f"p{share * 100:g}": values.quantile(share) for share in SHARES}
    return {"count": values.count, "mean": values.mean, **quantiles}


def chrome_events(spans: Sequence[Span], stations: Sequence[str]) -> list[dict[str, Any]]:
    """Complete events ("X") in microseconds; one process a station, one thread a lane, named."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": index, "tid": 0, "args": {"name": name}}
        for index, name in enumerate(stations)
    ]
    pairs = sorted({(span.station, span.lane) for span in spans})
    events += [
        {"name": "thread_name", "ph": "M", "pid": station, "tid": lane, "args": {"name": f"lane {lane}"}}
        for station, lane in pairs
    ]
    events += [
        {
            "name": f"lane {span.lane}",
            "ph": "X",
            "pid": span.station,
            "tid": span.lane,
            "ts": round(span.start_s * 1e6, 3),
            "dur": round(span.duration_s * 1e6, 3),
        }
        for span in spans
    ]
    return events


def write_chrome_trace(path: Path, spans: Sequence[Span], stations: Sequence[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump({"traceEvents": chrome_events(spans, stations), "displayTimeUnit": "ms"}, file)
