"""`crosspool simulate`: plan the input, or take a saved plan for it, run its workload, report.

The workload runs through the real control plane on a virtual clock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from crosspool.errors import CrossPoolError
from crosspool.planner.deployment import PlanInput, read_plan_input
from crosspool.planner.plan import read_plan
from crosspool.planner.planner import Planned
from crosspool.planner.saved import with_saved_plan
from crosspool.simulator.measured_files import read_measured
from crosspool.simulator.pipeline import Span
from crosspool.simulator.report import report_json, show_report, write_chrome_trace
from crosspool.simulator.result import GroupResult
from crosspool.simulator.simulated_plan import plan_as_told
from crosspool.simulator.simulator import SimulationSettings, simulate

PROGRESS_EVERY = 512
"""Events between two looks at the progress bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateFiles:
    """Files of one run: input, a saved plan for it, measured stage times; report and Chrome trace to write."""

    source: Path
    plan: Path | None = None
    measured: tuple[Path, ...] = ()
    output: Path | None = None
    chrome: Path | None = None


def run(files: SimulateFiles, settings: dict[str, object], *, as_json: bool, console: Console) -> None:
    """Raises CrossPoolError, in one line, for wrong input and for what does not fit."""
    try:
        rows = _row_numbers(str(settings.get("pass_rows", "")))
        wanted = SimulationSettings(**{**settings, "pass_rows": rows})  # type: ignore[arg-type]
        plan_input = read_plan_input(files.source)
        if files.plan is not None:
            planned, plan_input = with_saved_plan(read_plan(files.plan), plan_input)
        else:
            planned = plan_as_told(plan_input)
        spans: dict[str, list[Span]] | None = None if files.chrome is None else {}
        results = _simulate(files, plan_input, planned, wanted, spans)
    except ValueError as error:
        raise CrossPoolError(str(error)) from None
    if as_json:
        print(report_json(results), end="")
    else:
        show_report(results, console)
        for group in planned.groups:
            if group.plan.prefill is not None:
                ranks = ", ".join(group.plan.prefill.ranks)
                console.print(
                    f"- {group.plan.name}: prompts are simulated in the pools, not on {ranks}", highlight=False
                )
    # What is shown by now is not lost where a folder is not there, or a disk is full.
    if files.output is not None:
        _write(files.output, lambda path: path.write_text(report_json(results), encoding="utf-8"))
    if files.chrome is not None and spans is not None:
        for result in results:
            path = files.chrome
            if len(results) > 1:
                path = path.with_name(f"{path.stem}.{result.name}{path.suffix}")
            _write(path, partial(write_chrome_trace, spans=spans.get(result.name, []), stations=result.stations))
            if not as_json:
                console.print(f"wrote {path}", highlight=False)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise CrossPoolError(f"cannot write {path}: {error.strerror or error}") from None


def _row_numbers(text: str) -> tuple[int, ...]:
    """Raises ValueError for what is no list of numbers."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"pass_rows are {text!r}; give numbers with commas between, such as 1,2,4,8") from None


def _simulate(
    files: SimulateFiles,
    plan_input: PlanInput,
    planned: Planned,
    settings: SimulationSettings,
    spans: dict[str, list[Span]] | None,
) -> list[GroupResult]:
    tables = files.measured or plan_input.service.measured
    measured = read_measured(tables) if tables else None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {group.plan.name: bars.add_task(group.plan.name, total=settings.duration_s) for group in planned.groups}
        calls = 0

        def progress(group: str, now_s: float) -> None:
            nonlocal calls
            calls += 1
            if calls % PROGRESS_EVERY == 0:
                bars.update(tasks[group], completed=min(now_s, settings.duration_s))

        return simulate(planned, plan_input, settings, measured=measured, spans=spans, progress=progress)
