"""A result as files for people: Markdown with SVG pictures beside it, and one HTML page that holds everything."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from crosspool.bench.result import ALL, CURVE_LEVELS
from crosspool.bench.saved import write_text
from crosspool.bench.svg import line_chart
from crosspool.bench.table import SHOWN, cell, counts_table, headline, number, percentile_names, remarks, shown_models

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1e293b}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto;margin:1rem 0}"
    "th,td{padding:.25rem .6rem;border-bottom:1px solid #e2e8f0;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child,.times :is(th,td):nth-child(2){text-align:left}code{overflow-wrap:anywhere}"
    "ul{padding-left:1.2rem}.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(27rem,100%),1fr))}"
    "svg{width:100%;height:auto}"
)
LEAST_OF_A_SECOND = 0.25
"""Part of a run's last second from which its tokens are told as a rate."""


def write_report(result: Mapping[str, Any], stem: Path) -> list[Path]:
    """`stem`.md, .html and a picture for each chart. Raises ValueError where they cannot be written."""
    pictures = charts(result)
    written = [write_text(stem.with_name(f"{stem.name}-{name}.svg"), svg) for name, svg in pictures.items()]
    links = [f"![{name}]({path.name})" for name, path in zip(pictures, written, strict=True)]
    markdown = "\n\n".join((_markdown(result), *links)) + "\n"
    return [
        write_text(stem.with_name(stem.name + ".md"), markdown),
        write_text(stem.with_name(stem.name + ".html"), _html(result, pictures)),
        *written,
    ]


def charts(result: Mapping[str, Any]) -> dict[str, str]:
    """Name to SVG: how many TTFT and TBT are longer than a time, and the run by the second."""
    pictures = {}
    models = {name: figures for name, figures in result["models"].items() if name != ALL}
    for metric, title in SHOWN[:2]:
        lines = {name: _tail(figures, metric) for name, figures in models.items() if metric in figures["curves"]}
        if lines:
            pictures[metric.removesuffix("_ms")] = line_chart(
                f"{title} by model", "ms", "% of samples longer than that", lines, log_x=True, log_y=True
            )
    for key, title, unit in (
        ("output_tokens_per_s", "Output tokens", "tokens/s"),
        ("running_requests", "Requests under way", "requests"),
    ):
        lines = {name: _by_second(figures, key, result["duration"]) for name, figures in models.items()}
        if any(len(points) > 1 for points in lines.values()):  # not of a run that is over within a second
            pictures[key] = line_chart(title, "seconds", unit, lines)
    return pictures


def _tail(figures: Mapping[str, Any], metric: str) -> list[tuple[float, float]]:
    """(ms, percent of samples that are longer), as far as there are samples enough to tell."""
    values = figures["curves"][metric]
    smallest = 100.0 / figures.get(metric, {}).get("num", len(values))
    points = [(value, round(100.0 - level, 6)) for value, level in zip(values, CURVE_LEVELS, strict=True)]
    return [point for point in points if point[1] >= smallest]


def _by_second(figures: Mapping[str, Any], key: str, duration_s: float) -> list[tuple[float, float]]:
    """Of each second; tokens of the last one for as much of it as the run had."""
    values = [float(value) for value in figures["timeline"][key]]
    if key == "output_tokens_per_s" and len(values) == int(duration_s) + 1:
        part = duration_s - int(duration_s)
        values = [*values[:-1], values[-1] / part] if part >= LEAST_OF_A_SECOND else values[:-1]
    return [(float(second), value) for second, value in enumerate(values)]


def _title(result: Mapping[str, Any]) -> str:
    return f"Load on {result['model_id'].replace(',', ', ')}" + (f": {result['label']}" if result["label"] else "")


def _rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    levels = percentile_names(result)
    rows = []
    for name, figures in shown_models(result).items():
        for metric, title in SHOWN:
            if metric in figures:
                cells = [cell(figures[metric][level]) for level in levels]
                rows.append([name, title, number(figures[metric]["mean"]), *cells, number(figures[metric]["max"])])
    return ["model", "ms", "mean", *(f"{level} (95 % interval)" for level in levels), "max"], rows


def _facts(result: Mapping[str, Any]) -> list[str]:
    return [*headline(result), *remarks(result)]


def _markdown(result: Mapping[str, Any]) -> str:
    header, rows = _rows(result)
    facts = "\n".join(f"- {line}" for line in _facts(result))
    tables = (_table(*counts_table(result), num_left=1), _table(header, rows, num_left=2))
    origin = f"`{result['command']}`, {_origin(result)}"
    return "\n\n".join((f"# {_title(result)}", facts, *tables, origin))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int) -> str:
    """In Markdown. num_left: columns of words."""
    marks = ["---"] * num_left + ["---:"] * (len(header) - num_left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, marks, *rows))


def _origin(result: Mapping[str, Any]) -> str:
    moment = datetime.strptime(result["date"], "%Y%m%d-%H%M%S")
    return f"seed {result['seed']}, {moment:%Y-%m-%d %H:%M:%S} UTC, CrossPool {result['crosspool_version']}"


def _html(result: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    facts = "".join(f"<li>{escape(line)}</li>\n" for line in _facts(result))
    tables = _html_table(*counts_table(result), "counts") + _html_table(*_rows(result), "times")
    origin = f"<code>{escape(result['command'])}</code>, {escape(_origin(result))}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(_title(result))}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(_title(result))}</h1>\n<ul>{facts}</ul>\n"
        f'{tables}<div class="pictures">{"".join(pictures.values())}</div><p>{origin}</p></body></html>\n'
    )


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>\n" for row in rows)
    return f'<table class="{name}"><tr>{head}</tr>\n{body}</table>\n'
