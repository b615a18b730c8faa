"""The figures of one run as a JSON object: the keys of `vllm bench serve` for all models together, ours beside them.

Ours: `models` with every figure, interval and curve of each model; `client` with what the client itself added;
`timeline` by the second. Seconds where a key says nothing, milliseconds where it ends in `_ms`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from crosspool import __version__
from crosspool.bench.client import ClientRun
from crosspool.bench.quantiles import percentile_estimates
from crosspool.bench.record import RequestRecord
from crosspool.bench.server_times import QueueTimes
from crosspool.bench.settings import BenchSettings
from crosspool.bench.slo import Objective
from crosspool.workload.trace import FloatColumn

ALL = "all"
CURVE_LEVELS = (*range(0, 100, 2), 99, 99.5, 99.9, 100)
NAMES = {"ttft": "ttft_ms", "itl": "tbt_ms", "tpot": "tpot_ms", "e2el": "e2e_ms"}
"""vLLM's name of each metric to ours."""
_NUMBERS = re.compile(r"(HTTP \d+)|\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What was run, told in the result. command: the command line; rates: those realised, by model."""

    settings: BenchSettings
    command: str
    rates: Mapping[str, float]
    request_rate: float | str
    levels: tuple[float, ...]
    metrics: tuple[str, ...]
    objective: Objective


def result_dict(
    run: ClientRun, facts: RunFacts, queue_times: Mapping[str, QueueTimes], *, detailed: bool = False
) -> dict[str, Any]:
    """Everything about `run`, which has at least one record. detailed: vLLM's lists of every request too."""
    records, settings = run.records, facts.settings
    served = _served(records)
    duration = _duration_s(records)
    names = list(dict.fromkeys(sorted(record.model for record in records)))
    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "crosspool_version": __version__,
        "backend": "openai",
        "endpoint_type": "openai",
        "label": settings.label,
        "base_url": " ".join(settings.base_url),
        "endpoint": settings.endpoint,
        "command": facts.command,
        "seed": settings.seed,
        "model_id": names[0] if len(names) == 1 else ",".join(names),
        "trace": settings.trace.name if settings.trace is not None else None,
        "num_prompts": len(records),
        "request_rate": facts.request_rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "realised_rates": dict(facts.rates),
        "goodput_limits": facts.objective.words,
        **_totals(records, duration, facts.objective),
        "max_output_tokens_per_s": max(_tokens_by_second(served), default=0),
        "max_concurrent_requests": max(_running_by_second(records, duration), default=0),
    }
    whole = _measured(served, facts)
    for theirs, ours in NAMES.items():
        for key, value in whole.get(ours, {}).items():
            result[f"{key}_{theirs}_ms"] = value["value"] if isinstance(value, dict) else value
    result["models"] = {ALL: _of_model(records, facts, duration, None)} | {
        name: _of_model([r for r in records if r.model == name], facts, duration, queue_times.get(name))
        for name in names
    }
    result["client"] = _client(run, facts, duration)
    result["timeline"] = _timeline(records, duration)
    result["failures"] = _failures(records)
    if detailed:
        result |= _details(records)
    return result


def _served(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.outcome == "served"]


def _duration_s(records: Sequence[RequestRecord]) -> float:
    """To the last token, or the last request where none came."""
    return max(max((*record.token_times_s[-1:], record.started_s)) for record in records) or 1e-9


def _totals(records: Sequence[RequestRecord], duration_s: float, objective: Objective) -> dict[str, Any]:
    served = _served(records)
    prompt = sum(record.server_prompt_tokens for record in served)
    output = sum(record.output_tokens for record in served)
    good = sum(objective.is_met(record) for record in records)
    return {
        "duration": duration_s,
        "completed": len(served),
        "refused": sum(record.outcome == "refused" for record in records),
        "failed": sum(record.outcome == "failed" for record in records),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "cached_input_tokens": sum(record.cached_tokens for record in served),
        "request_throughput": len(served) / duration_s,
        "request_goodput": good / duration_s if objective.limits_ms else None,
        "goodput_share": good / len(records) if objective.limits_ms else None,
        "output_throughput": output / duration_s,
        "total_token_throughput": (prompt + output) / duration_s,
    }


def _measured(served: Sequence[RequestRecord], facts: RunFacts) -> dict[str, dict[str, Any]]:
    """Mean, median, deviation and percentiles with intervals of each metric that has values."""
    found: dict[str, dict[str, Any]] = {}
    for theirs, groups in _groups(served).items():
        values = np.concatenate(groups) if groups else np.empty(0)
        if theirs not in facts.metrics or not len(values):
            continue
        figures: dict[str, Any] = {
            "num": len(values),
            "mean": float(values.mean()),
            "median": float(np.median(values)),
            "std": float(values.std()),
            "max": float(values.max()),
        }
        for level, estimate in zip(
            facts.levels, percentile_estimates(groups, facts.levels, facts.settings.seed), strict=True
        ):
            figures[f"p{level:g}"] = estimate.as_dict()
        found[NAMES[theirs]] = figures
    return found


def _groups(served: Sequence[RequestRecord]) -> dict[str, list[FloatColumn]]:
    """Values in milliseconds of each metric, by request."""
    return {
        "ttft": [np.array([1e3 * record.ttft_s]) for record in served],
        "itl": [1e3 * record.gaps_s for record in served],
        "tpot": [np.array([1e3 * tpot]) for record in served if (tpot := record.tpot_s) is not None],
        "e2el": [np.array([1e3 * record.e2e_s]) for record in served],
    }


def _of_model(
    records: Sequence[RequestRecord], facts: RunFacts, duration_s: float, queue_times: QueueTimes | None
) -> dict[str, Any]:
    served = _served(records)
    waits = [1e3 * (record.started_s - record.due_s) for record in records]
    waited_s = [
        each.ttft_s if each.outcome == "served" else float("inf") for each in records if each.outcome != "refused"
    ]
    events = sum(len(record.token_times_s) for record in served)
    return {
        "num_prompts": len(records),
        **_totals(records, duration_s, facts.objective),
        "tokens_per_event": sum(record.output_tokens for record in served) / events if events else None,
        **_measured(served, facts),
        "server_queue": queue_times.as_dict(max(waited_s, default=0.0)) if queue_times is not None else None,
        "client_queue_ms": {"mean": float(np.mean(waits)), "max": float(np.max(waits))},
        "timeline": _timeline(records, duration_s),
        "curves": {
            NAMES[theirs]: [float(value) for value in np.percentile(np.concatenate(groups), CURVE_LEVELS)]
            for theirs, groups in _groups(served).items()
            if groups and sum(map(len, groups))
        },
    }


def _client(run: ClientRun, facts: RunFacts, duration_s: float) -> dict[str, Any]:
    tokens = sum(len(record.token_times_s) for record in run.records)
    late, lags = 1e3 * np.asarray(run.late_s or [0.0]), 1e3 * np.asarray(run.loop_lags_s or [0.0])
    return {
        "num_processes": facts.settings.num_processes,
        "cpu_s": run.cpu_s,
        "cpu_share": run.cpu_s / duration_s / facts.settings.num_processes,
        "cpu_us_per_token": 1e6 * run.cpu_s / tokens if tokens else None,
        **{f"late_p{level}_ms": float(np.percentile(late, level)) for level in (50, 99, 100)},
        **{f"loop_lag_p{level}_ms": float(np.percentile(lags, level)) for level in (50, 99, 100)},
    }


def _timeline(records: Sequence[RequestRecord], duration_s: float) -> dict[str, list[int]]:
    """By the second."""
    return {
        "output_tokens_per_s": _tokens_by_second(_served(records)),
        "running_requests": _running_by_second(records, duration_s),
    }


def _tokens_by_second(served: Sequence[RequestRecord]) -> list[int]:
    times = [moment for record in served for moment in record.token_times_s]
    return np.bincount(np.asarray(times, dtype=np.int64)).tolist() if times else []


def _running_by_second(records: Sequence[RequestRecord], duration_s: float) -> list[int]:
    """Requests under way, the most at once within each second."""
    changes = sorted(
        change
        for record in records
        if record.token_times_s
        for change in ((record.started_s, 1), (record.token_times_s[-1], -1))
    )
    most, running = [0] * (int(duration_s) + 1), 0
    last = 0
    for moment, change in changes:
        second = min(int(moment), len(most) - 1)
        for between in range(last, second + 1):
            most[between] = max(most[between], running)
        running, last = running + change, second
        most[second] = max(most[second], running)
    return most


def _failures(records: Sequence[RequestRecord]) -> dict[str, int]:
    """What requests that were not served ended with, and how many did; the ten most frequent.

    Words that differ in their numbers alone are one failure, told as it came first: each request has its own length.
    """
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for record in records:
        if record.outcome != "served":
            words = _NUMBERS.sub(lambda found: found[1] or "#", record.error)
            text = first.setdefault(words, record.error)
            counts[text] = counts.get(text, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:10])


def _details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "request_models": [record.model for record in records],
        "input_lens": [record.server_prompt_tokens for record in records],
        "output_lens": [record.output_tokens if record.outcome == "served" else 0 for record in records],
        "start_times": [record.started_s for record in records],
        "ttfts": [record.ttft_s if record.token_times_s else 0.0 for record in records],
        "itls": [record.gaps_s.tolist() for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }
