"""Measured stage times in place of the roofline, by model, stage and number of weights GPUs.

Either kept results of the benchmarks (`moe_layer_*.json`, `attention_half_*.json`, `decode_step_*.json`) or a table:

    {"models": {"qwen3-30b-a3b": {
        "ffn_us": {"1": {"1": 31.5, "2": 52.0}},             # weights GPUs -> rows -> one layer
        "attention_us": [[1, 1024, 18.1], [8, 32768, 95.0]],  # sequences, tokens of context each, one layer
        "crossing_us": 2.75, "tail_us": 150.0}}}

Every part may be left out; then the roofline stands. Between measured rows times are interpolated, beyond them the
roofline's ratio goes on. Attention is fitted as a constant plus a time for each cached token, on one KV GPU. On numbers
of GPUs that were not measured, and for prefill, what the nearest measurement exceeded its own roofline by is added.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from crosspool.planner.catalogue import lookup
from crosspool.planner.roofline import StageTimes
from crosspool.simulator.cost import MonolithicCost, PooledCost, StepCost, StepWork, decode_work


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel:
    """One model's measured times, in seconds. ffn_s: by number of weights GPUs, rows and times ascending."""

    ffn_s: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    attention_base_s: float | None = None
    attention_token_s: float = 0.0
    crossing_s: float | None = None
    tail_s: float | None = None


MeasuredTable = Mapping[str, MeasuredModel]

_FFN = re.compile(r"moe_us\.(?P<model>.+)\.b(?P<batch>\d+)\.uniform\.p50")
_ATTENTION = re.compile(r"attention_half_us\.(?P<model>.+)\.(?P<context>\d+)k\.b(?P<batch>\d+)\.p50")
_CROSSING = re.compile(r"decode_ms\.(?P<model>.+)\.1\+1\.b\d+\.\d+k\.graphs\.crossing_us_a_layer")
LEAST_CROSSING_US = 0.05
"""Of crossings that hide behind prefetched weights altogether."""


class MeasuredCost:
    """A roofline corrected by what was measured. is_whole: on one GPU, where nothing crosses."""

    def __init__(self, roofline: PooledCost, measured: MeasuredModel, *, is_whole: bool = False) -> None:
        self._roofline, self._measured, self._is_whole = roofline, measured, is_whole
        self._points: tuple[tuple[int, float], ...] = ()
        self._ffn_roofline = roofline
        if measured.ffn_s:
            nearest = min(measured.ffn_s, key=lambda ranks: (abs(ranks - roofline.num_weights), ranks))
            self._points = measured.ffn_s[nearest]
            self._ffn_roofline = PooledCost(roofline.facts, roofline.kind, num_kv=1, num_weights=nearest)
        self._rows = [rows for rows, _ in self._points]
        one = PooledCost(roofline.facts, roofline.kind, num_kv=1, num_weights=1)
        base_s = one.times(decode_work(1, 0.0)).attention_s
        self._attention_excess_s = (measured.attention_base_s or base_s) - base_s

    def times(self, work: StepWork) -> StageTimes:
        bound, measured = self._roofline.times(work), self._measured
        is_decode = work.num_tokens == work.num_sampled
        attention_s = max(1e-9, bound.attention_s + self._attention_excess_s)
        if measured.attention_base_s is not None and is_decode and self._roofline.num_kv == 1:
            attention_s = measured.attention_base_s + work.kv_tokens * measured.attention_token_s
        crossing_s = bound.crossing_s if measured.crossing_s is None or not is_decode else measured.crossing_s
        return StageTimes(
            num_layers=bound.num_layers,
            attention_s=attention_s,
            ffn_s=self._ffn_s(work.num_tokens, bound.ffn_s) if self._points else bound.ffn_s,
            crossing_s=0.0 if self._is_whole else crossing_s,
            tail_s=bound.tail_s if measured.tail_s is None or not work.num_sampled else measured.tail_s,
        )

    def _ffn_s(self, num_tokens: int, bound_s: float) -> float:
        measured_s = self._measured_ffn_s(num_tokens)
        if self._ffn_roofline.num_weights == self._roofline.num_weights:
            return measured_s
        return bound_s + max(0.0, measured_s - self._ffn_roofline.times(decode_work(num_tokens, 0.0)).ffn_s)

    def _measured_ffn_s(self, num_tokens: int) -> float:
        """On the measured number of GPUs."""
        after = bisect_right(self._rows, num_tokens)
        if 0 < after < len(self._rows):
            (low, low_s), (high, high_s) = self._points[after - 1], self._points[after]
            return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)
        rows, seconds = self._points[0 if after == 0 else -1]
        bound = self._ffn_roofline
        return seconds * bound.times(decode_work(num_tokens, 0.0)).ffn_s / bound.times(decode_work(rows, 0.0)).ffn_s


def with_measurements(cost: PooledCost, table: MeasuredTable, model: str) -> StepCost:
    """The cost corrected by the table's entry of the model, or of the catalogue entry it stands for, if any."""
    measured = _entry_of(table, model)
    return cost if measured is None else MeasuredCost(cost, measured)


def whole_with_measurements(cost: MonolithicCost, table: MeasuredTable, model: str) -> StepCost:
    """The same of a model that lies whole on one GPU; several all-reduce, which is not measured."""
    measured = _entry_of(table, model) if cost.num_gpus == 1 else None
    return cost if measured is None else MeasuredCost(cost.pooled, measured, is_whole=True)


def _entry_of(table: MeasuredTable, model: str) -> MeasuredModel | None:
    found = lookup(model)
    return table.get(model) or (table.get(found.entry) if found is not None else None)


def read_measured(paths: Sequence[Path]) -> MeasuredTable:
    """One table of several files; what two of them have, the later one gives.

    Raises ValueError, naming file and entry, for what cannot be read.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found = _entries(data["metrics"]) if "metrics" in data else dict(data["models"])
            for name, entry in found.items():
                _measured(entry)
                entries.setdefault(name, {}).update(entry)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no table of measured stage times: {type(error).__name__} {error}") from None
        if not found:
            raise ValueError(f"{path} is no table of measured stage times: it has none of a model's stages")
    return {name: _measured(entry) for name, entry in entries.items()}


def _entries(metrics: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """The table in a kept result. Crossings are those of whole steps: what both halves do not account for."""
    entries: dict[str, dict[str, Any]] = {}
    crossings: dict[str, list[float]] = {}
    for name, value in metrics.items():
        if found := _FFN.fullmatch(name):
            ffn = entries.setdefault(found["model"], {}).setdefault("ffn_us", {"1": {}})
            ffn["1"][found["batch"]] = value
        elif found := _ATTENTION.fullmatch(name):
            point = [int(found["batch"]), 1024 * int(found["context"]), value]
            entries.setdefault(found["model"], {}).setdefault("attention_us", []).append(point)
        elif found := _CROSSING.fullmatch(name):
            crossings.setdefault(found["model"], []).append(value / 2)
    for model, values in crossings.items():
        entries.setdefault(model, {})["crossing_us"] = max(LEAST_CROSSING_US, median(values))
    return entries


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
