"""A result as files for people: Markdown with SVG pictures beside it, and one HTML page that holds everything."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from crosspool.bench.result import ALL, CURVE_LEVELS
from crosspool.bench.saved import write_text
from crosspool.bench.svg import line_chart
from crosspool.bench.table import SHOWN, cell, headline, number, percentile_names, remarks

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1e293b}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}"
    "th,td{padding:.25rem .6rem;border-bottom:1px solid #e2e8f0;text-align:right;white-space:nowrap}"
    "th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}code{overflow-wrap:anywhere}"
    "svg{max-width:100%;height:auto;margin:.5rem 0}"
)


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
    """Name to SVG: how TTFT and TBT are distributed, and the run over time."""
    pictures = {}
    for metric, title in SHOWN[:2]:
        lines = {
            name: list(zip(figures["curves"][metric], CURVE_LEVELS, strict=True))
            for name, figures in result["models"].items()
            if name != ALL and metric in figures["curves"]
        }
        if lines:
            pictures[metric.removesuffix("_ms")] = line_chart(
                f"{title} by model", "ms", "% of samples up to it", lines, log_x=True
            )
    timeline = result["timeline"]
    for key, title, unit in (
        ("output_tokens_per_s", "Output tokens", "tokens/s"),
        ("running_requests", "Requests under way", "requests"),
    ):
        points = [(float(second), float(value)) for second, value in enumerate(timeline[key])]
        pictures[key] = line_chart(title, "seconds", unit, {"all": points})
    return pictures


def _title(result: Mapping[str, Any]) -> str:
    return f"Load on {result['model_id'].replace(',', ', ')}" + (f": {result['label']}" if result["label"] else "")


def _rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    levels = percentile_names(result)
    rows = []
    for name, figures in result["models"].items():
        for metric, title in SHOWN:
            if metric in figures:
                cells = [cell(figures[metric][level]) for level in levels]
                rows.append([name, title, number(figures[metric]["mean"]), *cells, number(figures[metric]["max"])])
    return ["model", "ms", "mean", *(f"{level} (95 % interval)" for level in levels), "max"], rows


def _facts(result: Mapping[str, Any]) -> list[str]:
    return [*headline(result), *remarks(result)]


def _markdown(result: Mapping[str, Any]) -> str:
    header, rows = _rows(result)
    table = ["| " + " | ".join(header) + " |", "| --- | --- |" + " ---: |" * (len(header) - 2)]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    facts = "\n".join(f"- {line}" for line in _facts(result))
    origin = f"`{result['command']}`, seed {result['seed']}, {result['date']}, CrossPool {result['crosspool_version']}"
    return "\n\n".join((f"# {_title(result)}", facts, "\n".join(table), origin))


def _html(result: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    header, rows = _rows(result)
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>\n" for row in rows)
    facts = "".join(f"<li>{escape(line)}</li>\n" for line in _facts(result))
    origin = f"<code>{escape(result['command'])}</code>, seed {result['seed']}, {result['date']}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(_title(result))}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(_title(result))}</h1>\n<ul>{facts}</ul>\n"
        f"<table><tr>{head}</tr>\n{body}</table>\n{''.join(pictures.values())}<p>{origin}</p></body></html>\n"
    )
