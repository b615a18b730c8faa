"""The curves of a kept `decode_step` result as a picture: `python -m benchmarks.decode_picture RESULT.json [WAY]`.

Milliseconds of a step over the batch, a panel for each model, a line for each context, and beside it that of its bytes.
The result's Markdown shows the picture.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import with_pictures
from crosspool.bench.svg import HEIGHT, WIDTH, line_chart

_STEP = re.compile(r"decode_ms\.(?P<model>.+)\.1\+1\.b(?P<batch>\d+)\.(?P<context>\d+)k\.(?P<way>[a-z_]+)\.p50")

Lines = dict[str, list[tuple[float, float]]]


def curves(result: Mapping[str, Any], way: str) -> dict[str, Lines]:
    """By model: points (batch, ms) of each context, and of its limits."""
    found: dict[str, Lines] = {}
    for name, value in result["metrics"].items():
        match = _STEP.fullmatch(name)
        if match is None or match["way"] != way:
            continue
        lines, batch = found.setdefault(match["model"], {}), float(match["batch"])
        lines.setdefault(f"{match['context']}K", []).append((batch, value))
        lines.setdefault(f"{match['context']}K bytes", []).append((batch, result["limits"][name]))
    return {model: {name: sorted(points) for name, points in lines.items()} for model, lines in found.items()}


def decode_picture(result: Mapping[str, Any], way: str) -> str:
    """SVG. Raises ValueError where the result has no such steps."""
    models = curves(result, way)
    if not models:
        raise ValueError(f"{result['what']} has no steps of one KV GPU and one weights GPU by {way}")
    panels = []
    for number, (model, lines) in enumerate(models.items()):
        chart = line_chart(f"{model}, 1+1, {way}", "batch", "ms a step", lines, log_x=True, log_y=True)
        panels.append(chart.replace("<svg ", f'<svg y="{number * HEIGHT}" ', 1))
    height = HEIGHT * len(models)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join((head, *panels, "</svg>\n"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("way", nargs="?", default="fused", help="of driving a step, as in the metrics' names")
    options = parser.parse_args()
    path: Path = options.result
    picture = path.with_name(f"{path.stem}_{options.way}.svg")
    picture.write_text(decode_picture(json.loads(path.read_text(encoding="utf-8")), options.way), encoding="utf-8")
    markdown = path.with_suffix(".md")
    markdown.write_text(with_pictures(markdown.read_text(encoding="utf-8"), [picture]), encoding="utf-8")
    print(picture)


if __name__ == "__main__":
    main()
