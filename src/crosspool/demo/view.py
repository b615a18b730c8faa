"""How the demo looks in a terminal: live lanes and pages while it runs, then answers, table and pool over time."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from crosspool.demo.client import Answer
from crosspool.demo.report import DemoReport, PoolSample
from crosspool.demo.scenario import DEMO_MODELS
from crosspool.units import format_bytes

COLOURS = dict(zip(DEMO_MODELS, ("cyan", "magenta", "yellow"), strict=True))
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def live_view(
    answers: Sequence[Answer], samples: Sequence[PoolSample], budget_frames: int, width: int
) -> RenderableType:
    """The running demo: which model each lane carries, whose pages fill the pool, how the answers grow."""
    if not samples:
        return Text("waiting for the first step ...")
    latest = samples[-1]
    lanes = Text("lanes  ")
    for lane, model in enumerate(latest.lanes):
        lanes.append(f" {lane} ", style="dim")
        lanes.append(f"{model or '-':<12}", style=COLOURS.get(model or "", "dim"))
    shown = dict.fromkeys(DEMO_MODELS, "") | {a.request.model: a.text for a in answers if a.request.shown}
    return Group(lanes, _pool_bar(latest, budget_frames, min(60, width - 30)), _side_by_side(shown))


def final_view(report: DemoReport, width: int) -> RenderableType:
    """Three answers side by side, the table, and the pool over time."""
    return Group(_side_by_side(report.answers), _table(report, width), _pool_panel(report, width))


def _side_by_side(answers: Mapping[str, str]) -> Table:
    table = Table(box=box.ROUNDED, expand=True, border_style="dim")
    for model in answers:
        table.add_column(Text(model, style=f"bold {COLOURS.get(model, 'white')}"), ratio=1, justify="left")
    table.add_row(*(Text(text.strip()) for text in answers.values()))
    return table


def _pool_bar(sample: PoolSample, budget_frames: int, width: int) -> Text:
    bar = Text("pages   ")
    filled = 0
    for model in DEMO_MODELS:
        cells = round(width * sample.frames_used.get(model, 0) / budget_frames)
        bar.append("█" * cells, style=COLOURS[model])
        filled += cells
    bar.append("░" * max(0, width - filled), style="dim")
    bar.append(f"  {sum(sample.frames_used.values())} of {budget_frames} frames", style="dim")
    return bar


def _table(report: DemoReport, width: int) -> Table:
    table = Table(
        box=box.ROUNDED,
        border_style="dim",
        padding=(0, 1 if width >= 80 else 0),
        title=f"{report.tokens_per_s:,.0f} tokens/s over all models, {report.wall_s:.1f} s",
    )
    table.add_column("model")
    for heading in ("requests", "tokens", "TTFT ms\nP50 / P99", "TBT ms\nP50 / P99", "tokens/s"):
        table.add_column(heading, justify="right")
    for model, figures in report.models.items():
        table.add_row(
            Text(model, style=COLOURS.get(model, "white")),
            str(figures.requests),
            f"{figures.tokens:,}",
            f"{_ms(figures.ttft_p50_ms)} / {_ms(figures.ttft_p99_ms)}",
            f"{_ms(figures.tbt_p50_ms)} / {_ms(figures.tbt_p99_ms)}",
            f"{figures.tokens_per_s:,.0f}",
        )
    return table


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _pool_panel(report: DemoReport, width: int) -> Panel:
    """A line for each model on one scale, that of the pool's peak."""
    pool = report.pool
    lines = Text()
    top = max(1, pool.peak_frames)
    columns = _resample(report.samples, max(10, width - 22))
    for model in DEMO_MODELS:
        lines.append(f"{model:<12}", style=COLOURS[model])
        for sample in columns:
            level = sample.frames_used.get(model, 0) / top
            lines.append(_EIGHTHS[min(8, -int(-level * 8 // 1))], style=COLOURS[model])
        lines.append(f" {pool.peak_frames_by_model.get(model, 0):>4}\n", style="dim")
    shared, separate = (frames * pool.frame_bytes for frames in (pool.peak_frames, pool.separate_caches_frames))
    lines.append(f"one shared pool peaked at {format_bytes(shared)}; ")
    lines.append(f"a cache for each model would have needed {format_bytes(separate)}", style="bold")
    return Panel(lines, title="KV pool over time, by model (right: peak frames)", border_style="dim")


def _resample(samples: Sequence[PoolSample], width: int) -> list[PoolSample]:
    if not samples:
        return []
    return [samples[i * len(samples) // width] for i in range(width)]
