"""Detailed result files of serving benchmarks (`crosspool bench` or `vllm bench serve`, `--save-detailed`).

Time to first token and the times between tokens give real service times: how long a request held its KV.
"""

import json
from pathlib import Path
from typing import Any

from crosspool.workload.text import open_text, seconds, whole_number
from crosspool.workload.trace import Trace, make_trace

NEEDED = ("input_lens", "output_lens", "ttfts", "itls")


def read_bench_result(path: Path, model: str | None = None) -> Trace:
    """The completed requests of one result file; service time is TTFT plus all inter-token times.

    Each request's model is in the file's request_models; without them all are of one, `model` or the file's model_id.

    Arrivals are the file's start_times; without them they are spread evenly over `duration`. Requests with an error,
    or without output, are left out. Raises ValueError naming the file and what it lacks.
    """
    with open_text(path) as file:
        try:
            result = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error.msg} in line {error.lineno}") from None
    lists = _lists(path, result)
    num = len(lists["input_lens"])
    errors = result.get("errors") or [""] * num
    starts = result.get("start_times") or _even_starts(path, result, num)
    if len(starts) != num or len(errors) != num:
        raise ValueError(f"{path}: {num} requests, {len(starts)} start_times and {len(errors)} errors; not one of each")
    kept = [row for row in range(num) if not errors[row] and lists["output_lens"][row]]
    if not kept:
        raise ValueError(f"{path} holds no completed request")
    first = min(starts[row] for row in kept)
    service = [
        seconds(lists["ttfts"][row], f"{path}: ttfts[{row}]") + sum(float(step) for step in lists["itls"][row])
        for row in kept
    ]
    name = model or str(result.get("model_id") or path.name.split(".")[0])
    names = result.get("request_models") or [name] * num
    if len(names) != num:
        raise ValueError(f"{path}: {num} requests and {len(names)} request_models; not one of each")
    models = tuple(dict.fromkeys(str(names[row]) for row in kept))
    return make_trace(
        [starts[row] - first for row in kept],
        [models.index(str(names[row])) for row in kept],
        [whole_number(lists["input_lens"][row], f"{path}: input_lens[{row}]") for row in kept],
        [whole_number(lists["output_lens"][row], f"{path}: output_lens[{row}]") for row in kept],
        models=models,
        service_s=service,
    )


def _lists(path: Path, result: Any) -> dict[str, list[Any]]:
    if not isinstance(result, dict) or any(not isinstance(result.get(name), list) for name in NEEDED):
        raise ValueError(f"{path} lacks {', '.join(NEEDED)} of each request; run the benchmark with --save-detailed")
    lists = {name: result[name] for name in NEEDED}
    if len({len(column) for column in lists.values()}) != 1:
        counts = ", ".join(f"{len(column)} {name}" for name, column in lists.items())
        raise ValueError(f"{path}: {counts}; the file must have one of each for every request")
    return lists


def _even_starts(path: Path, result: dict[str, Any], num: int) -> list[float]:
    duration = result.get("duration")
    if not isinstance(duration, int | float) or not duration > 0:
        raise ValueError(f"{path} has neither start_times nor a duration; arrivals cannot be told")
    return [row * float(duration) / num for row in range(num)]
