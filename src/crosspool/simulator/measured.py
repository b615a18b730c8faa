"""Measured stage times in place of the roofline: a small JSON file, by model, stage and number of weights GPUs.

    {"models": {"qwen3-30b-a3b": {
        "ffn_us": {"1": {"1": 31.5, "2": 52.0}},             # weights GPUs -> rows -> one layer
        "attention_us": [[1, 1024, 18.1], [8, 32768, 95.0]],  # sequences, tokens of context each, one layer
        "crossing_us": 2.75, "tail_us": 150.0}}}

Every part may be left out; then the roofline stands. Between measured rows times are interpolated, beyond them the
roofline's ratio goes on. Attention is fitted as a constant plus a time for each cached token.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from crosspool.planner.catalogue import lookup
from crosspool.planner.roofline import StageTimes
from crosspool.simulator.cost import StepCost, StepWork, decode_work


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel:
    """One model's measured times, in seconds. ffn_s: by number of weights GPUs, rows and times ascending."""

    ffn_s: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    attention_base_s: float | None = None
    attention_token_s: float = 0.0
    crossing_s: float | None = None
    tail_s: float | None = None


MeasuredTable = Mapping[str, MeasuredModel]


class MeasuredCost:
    """A roofline corrected by what was measured. Prefill keeps the roofline's attention, scaled like one token's."""

    def __init__(self, roofline: StepCost, measured: MeasuredModel, num_weights: int) -> None:
        self._roofline, self._measured = roofline, measured
        self._points = measured.ffn_s.get(num_weights, ())
        self._rows = [rows for rows, _ in self._points]
        base = roofline.times(decode_work(1, 0.0))
        self._attention_scale = (measured.attention_base_s or base.attention_s) / base.attention_s

    def times(self, work: StepWork) -> StageTimes:
        bound, measured = self._roofline.times(work), self._measured
        attention_s = bound.attention_s
        if measured.attention_base_s is not None:
            if work.num_tokens == work.num_sampled:  # decode
                attention_s = measured.attention_base_s + work.kv_tokens * measured.attention_token_s
            else:
                attention_s *= self._attention_scale
        return StageTimes(
            num_layers=bound.num_layers,
            attention_s=attention_s,
            ffn_s=self._ffn_s(work.num_tokens, bound.ffn_s) if self._points else bound.ffn_s,
            crossing_s=bound.crossing_s if measured.crossing_s is None else measured.crossing_s,
            tail_s=bound.tail_s if measured.tail_s is None or not work.num_sampled else measured.tail_s,
        )

    def _ffn_s(self, num_tokens: int, bound_s: float) -> float:
        after = bisect_right(self._rows, num_tokens)
        if 0 < after < len(self._rows):
            (low, low_s), (high, high_s) = self._points[after - 1], self._points[after]
            return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)
        rows, seconds = self._points[0 if after == 0 else -1]
        edge = self._roofline.times(decode_work(rows, 0.0)).ffn_s
        return bound_s * seconds / edge


def with_measurements(cost: StepCost, table: MeasuredTable, model: str, num_weights: int) -> StepCost:
    """The cost corrected by the table's entry of the model, or of the catalogue entry it stands for, if any."""
    found = lookup(model)
    measured = table.get(model) or (table.get(found.entry) if found is not None else None)
    return cost if measured is None else MeasuredCost(cost, measured, num_weights)


def read_measured(path: Path) -> MeasuredTable:
    """Raises ValueError, naming file and entry, for what cannot be read."""
    try:
        models: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["models"]
        return {name: _measured(entry) for name, entry in models.items()}
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no table of measured stage times: {type(error).__name__} {error}") from None


def _measured(entry: Mapping[str, Any]) -> MeasuredModel:
    measured = MeasuredModel(
        ffn_s={
            int(ranks): tuple(sorted((int(rows), _seconds(value)) for rows, value in points.items()))
            for ranks, points in entry.get("ffn_us", {}).items()
        },
        crossing_s=_seconds(entry["crossing_us"]) if "crossing_us" in entry else None,
        tail_s=_seconds(entry["tail_us"]) if "tail_us" in entry else None,
    )
    points = entry.get("attention_us", [])
    if points:
        base_s, token_s = _fit(points)
        measured = replace(measured, attention_base_s=base_s, attention_token_s=token_s)
    return measured


def _seconds(microseconds: Any) -> float:
    value = float(microseconds) * 1e-6
    if not 0 < value < 60:
        raise ValueError(f"{microseconds} us is no time of a stage; it must be above 0")
    return value


def _fit(points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Constant and slope of attention time over cached tokens of all sequences; one point fixes the constant alone."""
    tokens = np.array([sequences * context for sequences, context, _ in points], dtype=np.float64)
    seconds = np.array([_seconds(value) for *_, value in points])
    if len(set(tokens.tolist())) == 1:
        return float(seconds.mean()), 0.0
    slope, base = np.polyfit(tokens, seconds, 1)
    return max(1e-9, float(base)), max(0.0, float(slope))
