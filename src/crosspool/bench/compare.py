"""Two results side by side: which figures differ by more than their intervals."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from crosspool.bench.result import ALL

Verdict = Literal["better", "worse", "same", ""]
TIMES = ("ttft_ms", "tbt_ms", "tpot_ms", "e2e_ms")
LOADS = ("endpoint", "trace", "num_prompts", "request_rate", "burstiness", "max_concurrency", "seed", "goodput_limits")
"""What two results have to agree in, as far as both tell."""
UNLIKE = 1.05
"""Ratio of mean lengths from which they differ."""
COUNTS = ("request_throughput", "output_throughput", "goodput_share", "refused", "failed")


FEWEST_REQUESTS = 8
"""Served ones of each result, below which an interval says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One figure of both results.

    verdict: of the second; `same` where intervals overlap, empty without intervals or with too few requests.
    """

    model: str
    metric: str
    first: float
    second: float
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        return self.second / self.first if self.first else None


def unlike_loads(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """In what the loads differ, a few words each: figures of unlike loads say little about the servers."""
    told = [
        f"{name} {_told(first[name])} and {_told(second[name])}"
        for name in LOADS
        if name in first and name in second and first[name] != second[name]
    ]
    for name, total in (("prompt", "total_input_tokens"), ("output", "total_output_tokens")):
        means = [result[total] / max(1, result["completed"]) for result in (first, second)]
        if max(means) > UNLIKE * min(means):
            told.append(f"{name} tokens a request {means[0]:.0f} and {means[1]:.0f}")
    return told


def _told(value: Any) -> Any:
    return "none" if value in (None, "") else value


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Every figure that both have, model by model. Raises ValueError where no model is in both."""
    names = [name for name in first["models"] if name in second["models"]]
    both = [name for name in names if name != ALL]
    if not both:
        raise ValueError("the two results have no model in common; serve them under the same names")
    if all(len(result["models"]) == 2 for result in (first, second)):
        names = both  # what all models show is what the one does
    return [found for name in names for found in _of_model(name, first["models"][name], second["models"][name])]


def _of_model(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    is_told = min(first["completed"], second["completed"]) >= FEWEST_REQUESTS
    for metric in TIMES:
        for key, value in first.get(metric, {}).items():
            other = second.get(metric, {}).get(key)
            if isinstance(value, dict) and isinstance(other, dict):
                yield Difference(
                    model=name,
                    metric=f"{metric}.{key}",
                    first=value["value"],
                    second=other["value"],
                    verdict=_verdict(value, other) if is_told else "",
                )
    for metric in COUNTS:
        if first.get(metric) is not None and second.get(metric) is not None:
            yield Difference(model=name, metric=metric, first=first[metric], second=second[metric], verdict="")


def _verdict(first: Mapping[str, float], second: Mapping[str, float]) -> Verdict:
    """Of a time, where less is better."""
    if second["high"] < first["low"]:
        return "better"
    return "worse" if second["low"] > first["high"] else "same"
