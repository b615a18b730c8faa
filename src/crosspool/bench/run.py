"""One run of `crosspool bench` from its settings: requests, warm-up, load, figures, files."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from crosspool.bench.client import ENDED, NOT_SERVED, STARTED, TOKENS, LoadSettings
from crosspool.bench.processes import run_clients
from crosspool.bench.record import RequestRecord
from crosspool.bench.report import write_report
from crosspool.bench.requests import planned_requests
from crosspool.bench.result import NAMES, RunFacts, result_dict
from crosspool.bench.saved import make_folder, write_result
from crosspool.bench.server import listed_models, read_queues, warm_up
from crosspool.bench.server_times import queue_times_between
from crosspool.bench.settings import BenchSettings
from crosspool.bench.slo import parse_objective
from crosspool.bench.table import show_result
from crosspool.bench.target import Target
from crosspool.bench.traffic import PlannedRequest, realised_rates


def run(settings: BenchSettings, *, as_json: bool = False, console: Console | None = None) -> dict[str, Any]:
    """The result, shown on `console` and written as the settings say. Raises ValueError or CrossPoolError."""
    load = LoadSettings(max_concurrency=settings.max_concurrency, timeout_s=settings.timeout_s)
    metrics, levels = _metrics(settings.metrics), _levels(settings.percentiles)
    objective = parse_objective(settings.goodput)
    if settings.saves:
        make_folder(settings.result_dir)
    urls = _base_urls(settings)
    models = tuple(urls)
    targets = {name: _target(settings, url) for name, url in urls.items()}
    planned = planned_requests(settings, models)
    warm_up(planned, targets, settings.num_warmups, settings.timeout_s)
    before = read_queues(urls.values(), settings.api_key)
    with _ProgressBar(planned) as show:
        measured = run_clients(planned, targets, load, settings.num_processes, show)
    queues = queue_times_between(before, read_queues(urls.values(), settings.api_key))
    facts = RunFacts(
        settings=settings,
        command=_command(),
        rates=realised_rates(planned, _span_s(settings, planned, measured.records)),
        request_rate=_told_rate(settings),
        levels=levels,
        metrics=metrics,
        objective=objective,
    )
    result = result_dict(measured, facts, queues, detailed=settings.detailed)
    console = console or Console()
    if as_json:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        show_result(result, console)
    written: list[Path] = []  # after it is shown: a disk that is full by now takes no result away
    if settings.saves:
        written.append(write_result(result, settings.result_dir, settings.result_filename))
    if settings.reports:
        written += write_report(result, written[0].with_suffix(""))
    for path in written if not as_json else ():
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return result


def _base_urls(settings: BenchSettings) -> dict[str, str]:
    """Every model to ask and where: those named, or all that the server lists."""
    common: str | None = None
    own: dict[str, str] = {}
    for word in settings.base_url:
        name, found, url = word.partition("=")
        if found and "://" not in name:
            own[name] = url
        else:
            common = word
    listed = () if settings.models or common is None else listed_models(common, settings.api_key)
    names = settings.models or (*own, *(name for name in listed if name not in own))
    urls = {name: own.get(name, common) for name in names}
    known = {name: url for name, url in urls.items() if url is not None}
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"no --base-url for {missing[0]}; give --base-url URL, or {missing[0]}=URL")
    return known


def _target(settings: BenchSettings, base_url: str) -> Target:
    try:
        extra = json.loads(settings.extra_body) if settings.extra_body else {}
    except ValueError as error:
        raise ValueError(f"--extra-body is no JSON ({error}); give an object such as '{{\"top_k\": 1}}'") from None
    if not isinstance(extra, dict):
        raise ValueError(f"--extra-body is a {type(extra).__name__}; give a JSON object")
    return Target(
        base_url=base_url,
        endpoint=settings.endpoint,
        api_key=settings.api_key,
        ignore_eos=settings.ignore_eos,
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        tokenizer=settings.tokenizer,
        extra_body=extra,
        seed=settings.seed,
    )


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple("itl" if name == "tbt" else name for name in text.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"--percentile-metrics has {unknown[0]!r}; use {', '.join(NAMES)}")
    return names


def _levels(text: str) -> tuple[float, ...]:
    try:
        levels = tuple(float(part) for part in text.split(","))
    except ValueError:
        levels = (-1.0,)
    if any(not 0 <= level <= 100 for level in levels):
        raise ValueError(f"--metric-percentiles is {text!r}; give numbers from 0 to 100, such as 50,95,99")
    return levels


def _span_s(
    settings: BenchSettings, planned: Sequence[PlannedRequest], records: Sequence[RequestRecord]
) -> float | None:
    """The time that requests were sent in; None: each model's until its own last one.

    Longer than the plan's where a bound on those under way held requests back.
    """
    last_due_s = max(request.due_s for request in planned)
    span_s = settings.duration_s if settings.num_prompts is None else None
    if settings.trace is not None:
        span_s = last_due_s
    if settings.max_concurrency is not None and last_due_s:
        span_s = max(span_s or last_due_s, *(record.started_s for record in records))
    return span_s


def _told_rate(settings: BenchSettings) -> float | str:
    if settings.trace is not None:
        return "trace"
    return _shown_rate(settings.request_rate) if settings.ramp is None else f"{settings.ramp} ramp"


def _shown_rate(words: Sequence[str]) -> float | str:
    """A number where there is one for all, as vLLM's files have it."""
    if len(words) == 1 and "=" not in words[0]:
        return words[0] if words[0] == "inf" else float(words[0])
    return " ".join(words)


def _command() -> str:
    """This command line without keys."""
    words = ["crosspool", *sys.argv[1:]]
    hidden = [index + 1 for index, word in enumerate(words) if word == "--api-key"]
    shown = ["***" if index in hidden else word for index, word in enumerate(words)]
    return shlex.join("--api-key=***" if word.startswith("--api-key=") else word for word in shown)


class _ProgressBar:
    """Context of a progress bar on standard error; gives the function that shows a tally."""

    def __init__(self, planned: Sequence[PlannedRequest]) -> None:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bars.add_task("", total=len(planned))
        self._num = len(planned)

    def __enter__(self) -> "_ProgressBar":
        self._bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bars.stop()

    def __call__(self, tally: Sequence[int]) -> None:
        ended, running = tally[ENDED], tally[STARTED] - tally[ENDED]
        told = f"{ended}/{self._num} ended, {running} under way, {tally[NOT_SERVED]} not served, {tally[TOKENS]} tokens"
        self._bars.update(self._task, completed=ended, description=told)
