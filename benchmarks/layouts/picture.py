"""Times between tokens by layout, as a picture: how long the longest gap in N is, a panel for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosspool.bench.svg import HEIGHT, WIDTH, line_chart

ONE_IN = tuple(float(number) for number in np.geomspace(1.25, 1000.0, 80))
"""Gaps of which one is longer: 2 stands for P50, 100 for P99."""


def gap_lines(run: Mapping[str, Any], model: str) -> list[tuple[float, float]]:
    """(N, milliseconds that one gap in N is longer than) of a detailed result; none where the model has no gaps."""
    gaps = [gap for name, gaps in zip(run["request_models"], run["itls"], strict=True) if name == model for gap in gaps]
    if not gaps:
        return []
    values = np.quantile(1e3 * np.asarray(gaps), [1 - 1 / number for number in ONE_IN])
    return list(zip(ONE_IN, values.tolist(), strict=True))


def tbt_picture(runs: Mapping[str, Mapping[str, Any]], models: Sequence[str], rate: str) -> str:
    """One SVG of all layouts' runs at a rate."""
    panels = []
    for number, model in enumerate(models):
        lines = {layout: gap_lines(run, model) for layout, run in runs.items()}
        across = "one gap in ... is longer (2: P50, 100: P99)"
        title = f"{model}, {rate} requests/s each"
        chart = line_chart(title, across, "ms between tokens", lines, log_x=True, log_y=True)
        panels.append(chart.replace("<svg ", f'<svg y="{number * HEIGHT}" ', 1))
    height = HEIGHT * len(models)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join((head, *panels, "</svg>\n"))


def write_pictures(
    directory: Path, stem: str, runs: Mapping[str, Mapping[str, Mapping[str, Any]]], models: Sequence[str]
) -> list[Path]:
    """One file for each rate of `runs` (by rate and layout) that has any."""
    paths = []
    for rate, by_layout in runs.items():
        detailed = {layout: run for layout, run in by_layout.items() if "itls" in run}
        if detailed:
            path = directory / f"{stem}_tbt_{rate}.svg"
            path.write_text(tbt_picture(detailed, models, rate), encoding="utf-8")
            paths.append(path)
    return paths
