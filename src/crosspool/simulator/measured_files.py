"""Tables of measured stage times from files: kept results of the benchmarks (`moe_layer_*.json`,
`attention_half_*.json`, `decode_step_*.json`, `lanes_*.json`, `prefill_*.json`), or

    {"models": {"qwen3-30b-a3b": {
        "ffn_us": {"1": {"1": 31.5, "2": 52.0}},             # weights GPUs -> rows -> one layer
        "attention_us": [[1, 1024, 18.1], [8, 32768, 95.0]],  # sequences, tokens of context each, one layer
        "crossing_us": 2.75,                                  # one direction; or rows -> time
        "tail_us": 150.0,
        "prefill_ms": {"4096": 92.5},                         # tokens of a prompt alone -> to its first token
        "beside_prompt_us": 2900.0,                           # longer a decode step while a prompt runs beside it
        "prompt_slower": 1.5,                                 # a prompt beside decode, against it alone
        "whole_ms": {"4096": 3.47},                           # tokens of context -> a lone token, whole on one GPU
        "one_gpu_ms": {"4096": 4.17},                         # the same, both pools on one GPU
        "shared_efficiency": {"12": 0.93},                    # as below, with a share of the FFN beside attention
        "lanes_efficiency": {"1": 0.9, "8": 0.93}}}}          # rows -> of two lanes, against what stage times allow

Every part may be left out; then the roofline stands. What whole steps show of a stage is preferred to what it takes by
itself: steps with a layer as one kernel (`fused`), as a server runs them, before those of three kernels (`graphs`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from crosspool.simulator.measured import MeasuredModel, MeasuredTable, Points, sorted_points

_FFN = re.compile(r"moe_us\.(?P<model>.+)\.b(?P<batch>\d+)\.uniform\.p50")
_ATTENTION = re.compile(r"attention_half_us\.(?P<model>.+)\.(?P<context>\d+)k\.b(?P<batch>\d+)\.p50")
_IN_STEP = re.compile(
    r"decode_us_a_layer\.(?P<model>.+)\.1\+1\.b(?P<batch>\d+)\.(?P<context>\d+)k\.(?P<way>graphs|fused)\.(?P<part>ffn|rest)"
    r"|decode_ms\.(?P<old_model>.+)\.1\+1\.b(?P<old_batch>\d+)\.(?P<old_context>\d+)k\.graphs"
    r"\.(?P<old_part>ffn|crossing)_us_a_layer"
)
_LANES = re.compile(
    r"pipeline_efficiency\.(?P<model>[^+]+)(?P<share>\.1\+1s\d+)?\.b(?P<batch>\d+)"
    r"(\+(?P=model)(?(share)(?P=share))\.b(?P=batch)\.\d+k\.fused|\.pause\d+\.words)"
)
_PREFILL = re.compile(r"ttft_ms\.(?P<model>.+)\.1\+1\.(?P<context>\d+)k")
_WHOLE = re.compile(r"alone_tbt_ms\.(?:(?P<layout>static)-\d+|crosspool-1)\.(?P<model>.+)\.(?P<context>\d+)k\.p50")
LEAST_CROSSING_US = 0.05
"""Of crossings that hide behind prefetched weights altogether."""


def read_measured(paths: Sequence[Path]) -> MeasuredTable:
    """One table of several files; what two of them have, the later one gives: of FFNs and crossings, row by row.

    Raises ValueError, naming file and entry, for what cannot be read.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path in paths:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found = _entries(data["metrics"]) if "metrics" in data else dict(data["models"])
            for name, entry in found.items():
                _measured(entry)
                entries[name] = _updated(entries.get(name, {}), entry)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no table of measured stage times: {type(error).__name__} {error}") from None
        if not found:
            raise ValueError(f"{path} is no table of measured stage times: it has none of a model's stages")
    return {name: _measured(entry) for name, entry in entries.items()}


def _updated(older: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**older, **newer}
    for part in ("ffn_us", "crossing_us"):
        both = [entry[part] for entry in (older, newer) if isinstance(entry.get(part), Mapping)]
        if len(both) == 2:
            merged[part] = {**both[0], **both[1]} if part == "crossing_us" else _each_updated(*both)
    return merged


def _each_updated(older: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    return {ranks: {**older.get(ranks, {}), **newer.get(ranks, {})} for ranks in {**older, **newer}}


def _entries(metrics: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """The table in a kept result. Crossings are those of whole steps: what both halves do not account for."""
    entries: dict[str, dict[str, Any]] = {}
    in_steps: dict[tuple[str, str, str], dict[str, list[float]]] = {}  # model, batch, part -> way -> values
    efficiencies: dict[tuple[str, str], dict[str, list[float]]] = {}  # model, kind -> batch -> values
    for name, value in metrics.items():
        if found := _FFN.fullmatch(name):
            ffn = entries.setdefault(found["model"], {}).setdefault("ffn_us", {"1": {}})
            ffn["1"][found["batch"]] = value
        elif found := _ATTENTION.fullmatch(name):
            point = [int(found["batch"]), 1024 * int(found["context"]), value]
            entries.setdefault(found["model"], {}).setdefault("attention_us", []).append(point)
        elif found := _PREFILL.fullmatch(name):
            prefill = entries.setdefault(found["model"], {}).setdefault("prefill_ms", {})
            prefill[str(1024 * int(found["context"]))] = value
        elif found := _WHOLE.fullmatch(name):
            kind = "whole_ms" if found["layout"] == "static" else "one_gpu_ms"
            whole = entries.setdefault(found["model"], {}).setdefault(kind, {})
            whole[str(1024 * int(found["context"]))] = value
        elif found := _IN_STEP.fullmatch(name):
            model, batch = found["model"] or found["old_model"], found["batch"] or found["old_batch"]
            part, way = found["part"] or found["old_part"], found["way"] or "graphs"
            in_steps.setdefault((model, batch, part), {}).setdefault(way, []).append(value)
        elif found := _LANES.fullmatch(name):
            key = (found["model"], "shared_efficiency" if found["share"] else "lanes_efficiency")
            efficiencies.setdefault(key, {}).setdefault(found["batch"], []).append(value)
    _add_sharing(entries, metrics)
    for model in {model for model, _, part in in_steps if part == "ffn"}:
        entries.setdefault(model, {})["ffn_us"] = {"1": {}}  # in place of what the stage takes by itself
    for (model, batch, part), by_way in in_steps.items():
        entry, value = entries.setdefault(model, {}), median(by_way.get("fused") or by_way["graphs"])
        if part == "ffn":
            entry["ffn_us"]["1"][batch] = value
        else:
            entry.setdefault("crossing_us", {})[batch] = max(LEAST_CROSSING_US, value / 2)
    for (model, kind), points in efficiencies.items():
        entries.setdefault(model, {})[kind] = {batch: min(1.0, median(values)) for batch, values in points.items()}
    return entries


def _add_sharing(entries: dict[str, dict[str, Any]], metrics: Mapping[str, float]) -> None:
    """What prompts and decode cost each other, by the shortest prompts that were measured."""
    prompts = [match for name in metrics if (match := _PREFILL.fullmatch(name))]
    if not prompts:
        return
    shortest = min(int(match["context"]) for match in prompts)
    longer: dict[str, list[float]] = {}
    for model in (match["model"] for match in prompts if int(match["context"]) == shortest):
        case = f"{model}.1+1.{shortest}k"
        if beside := metrics.get(f"ttft_ms_beside_decode.{case}"):
            entries[model]["prompt_slower"] = beside / metrics[f"ttft_ms.{case}"]
        during = "tbt_p50_ms_during_prefill."
        for name in metrics:
            if name.startswith(during) and name.endswith(f".{case}"):
                before_ms = metrics[name.replace("_during_", "_before_")]
                neighbour = name.removeprefix(during).removesuffix(f".{case}")
                longer.setdefault(neighbour, []).append(1e3 * (metrics[name] - before_ms))
    for neighbour, values in longer.items():
        entries.setdefault(neighbour, {})["beside_prompt_us"] = median(values)


def _measured(entry: Mapping[str, Any]) -> MeasuredModel:
    points = entry.get("attention_us", [])
    base_s, row_s, token_s = _fit(points) if points else (None, 0.0, 0.0)
    crossing = entry.get("crossing_us", {})
    lanes, shared = _efficiency(entry, "lanes_efficiency"), _efficiency(entry, "shared_efficiency")
    return MeasuredModel(
        ffn_s={
            int(ranks): sorted_points([(int(rows), _seconds(value)) for rows, value in by_rows.items()])
            for ranks, by_rows in entry.get("ffn_us", {}).items()
        },
        attention_base_s=base_s,
        attention_token_s=token_s,
        attention_row_s=row_s,
        crossing_s=sorted_points(
            [(int(rows), _seconds(value)) for rows, value in crossing.items()]
            if isinstance(crossing, Mapping)
            else [(1, _seconds(crossing))]
        ),
        tail_s=_seconds(entry["tail_us"]) if "tail_us" in entry else None,
        lanes_efficiency=lanes,
        shared_efficiency=shared,
        prefill_s=_by_tokens(entry, "prefill_ms"),
        beside_prompt_s=_seconds(entry["beside_prompt_us"]) if "beside_prompt_us" in entry else None,
        prompt_slower=_ratio(entry, "prompt_slower"),
        whole_s=_by_tokens(entry, "whole_ms"),
        one_gpu_s=_by_tokens(entry, "one_gpu_ms"),
    )


def _by_tokens(entry: Mapping[str, Any], kind: str) -> Points:
    return sorted_points([(int(tokens), _seconds(1e3 * value)) for tokens, value in entry.get(kind, {}).items()])


def _efficiency(entry: Mapping[str, Any], kind: str) -> Points:
    points = sorted_points([(int(rows), float(value)) for rows, value in entry.get(kind, {}).items()])
    if not all(0 < value <= 1 for _, value in points):
        raise ValueError(f"{kind} has {points}; each must be above 0 and at most 1")
    return points


def _ratio(entry: Mapping[str, Any], kind: str) -> float | None:
    if kind not in entry:
        return None
    value = float(entry[kind])
    if not 0 < value < 1000:
        raise ValueError(f"{kind} is {value:g}; it must be above 0")
    return value


def _seconds(microseconds: Any) -> float:
    value = float(microseconds) * 1e-6
    if not 0 < value < 60:
        raise ValueError(f"{microseconds} us is no time of a stage; it must be above 0")
    return value


def _fit(points: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Attention time of one row without cache, and what each more row and each cached token of all rows add.

    Points of one context cannot tell rows and tokens apart: then tokens take it all; a single one fixes the constant.
    """
    rows = np.array([sequences - 1 for sequences, *_ in points], dtype=np.float64)
    tokens = np.array([sequences * context for sequences, context, _ in points], dtype=np.float64)
    seconds = np.array([_seconds(value) for *_, value in points])
    if len(set(tokens.tolist())) == 1:
        return float(seconds.mean()), 0.0, 0.0
    if len({context for _, context, _ in points}) > 1 and len(set(rows.tolist())) > 1 and len(points) > 2:
        parts = np.stack([np.ones_like(rows), rows, tokens], axis=1)
        base, row, token = np.linalg.lstsq(parts, seconds, rcond=None)[0]
        if min(base, row, token) >= 0:
            return max(1e-9, float(base)), float(row), float(token)
    slope, base = np.polyfit(tokens, seconds, 1)
    return max(1e-9, float(base)), 0.0, max(0.0, float(slope))
