"""The kept result of `bench_layouts_gpu` from its measurements, with the targets as limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from benchmarks.full_models import CONFIGS
from benchmarks.layouts.account import as_memory, deployment
from benchmarks.layouts.company import gaps_by_company
from benchmarks.layouts.figures import add_layout_ratios, add_load
from benchmarks.layouts.memory import kv_room, tokens_in
from benchmarks.layouts.peers import add_peers
from benchmarks.layouts.predicted import (
    has_present_kernels,
    kv_demand,
    kv_held,
    kv_simulated,
    outlook,
    simulated,
    stage_times,
)
from benchmarks.layouts.runs import Runs
from benchmarks.layouts.server import GPU_LAYOUTS, VARIANTS, beside_share, num_gpus
from benchmarks.layouts.targets import SIMULATED_PERCENT, mark_targets, targets, verdict
from benchmarks.report import Report
from crosspool.simulator.group import Layout
from crosspool.simulator.result import GroupResult
from crosspool.units import GiB, MiB

RATES = ("0.8", "2.0")
OURS = ("crosspool-1+1", "crosspool-1+3", "crosspool-1")
"""The layout that simulator and answers of others are compared with: the first that was measured."""

UNSERVED = ("crosspool-1+3", "static-4", "elastic-4")
"""Layouts whose longest requests are computed where no four GPUs were there to serve them."""

VLLM_ALONE_MS = {"qwen3-30b-a3b": 4.49, "glm-4.7-flash": 5.46, "deepseek-v2-lite": 3.40}
"""vLLM 0.24, whole on one such GPU, one request at 4,096 tokens."""
FEWEST_GAPS = 20
"""Between tokens, of which a median is told."""
CUT_BELOW_S = 90.0
"""A run whose last request came before is told to be a part of its trace."""


def layouts_report(runs: Runs, models: Sequence[str], config: Mapping[str, Any], commit: str | None = None) -> Report:
    """A report of whatever has been measured, with the machine of the last run."""
    machines = runs.machines()
    gpu_count = max((len(machine["hardware"]["gpus"]) for machine in machines), default=0)
    hardware = "h200" if gpu_count < 2 else f"h200-x{gpu_count}"
    facts = {"models": list(models), "temperature": 1.0, **config}
    origin = {**(machines[-1] if machines else {}), **({"commit": commit} if commit else {})}
    report = Report("layouts", hardware=hardware, config=facts, seed=2026, origin=origin)
    loads = measured_loads(runs)
    for layout in every_layout():
        for rate in RATES:
            if layout in loads[rate]:
                _add_load(report, layout, rate, loads[rate][layout], models)
        _add_lone_figures(report, runs, layout, models)
    if gpu_count > 1 and set(models) <= set(CONFIGS):
        _add_computed_requests(report, models, str(config.get("kv_pool_bytes", "48GiB")))
    ours = next((name for name in OURS if loads["0.8"].get(name)), "crosspool-1+1" if gpu_count > 1 else "crosspool-1")
    errors = [abs(report.metrics[name]) for name in report.metrics if _is_error_of(name, ours, "p99")]
    if errors:
        report.metric("sim_error_percent.p99", max(errors), note=f"of {ours}'s TBT, the model that is furthest off")

    def unlike(rate: str, *pair: str) -> str:
        return _unlike([loads[rate][name] for name in pair])

    add_layout_ratios(report, models, RATES, unlike=unlike)
    for layout in every_layout():
        for model in models if layout != ours else ():
            same = _same_words(runs.find(f"answers_{ours}_{model}"), runs.find(f"answers_{layout}_{model}"))
            if same is not None:
                report.metric(f"same_tokens.{layout}.{model}", same, limit=1.0, note=f"share, greedy, as {ours} gives")
    if gpu_count == 2:
        add_peers(report, models, [rate for rate in RATES if loads[rate]])
    wanted = targets(models, RATES)
    mark_targets(report, wanted)
    report.summary = "\n\n".join((_what_ran(loads), verdict(report, wanted)))
    return report


def every_layout() -> list[str]:
    """All layouts on GPUs, the variants of each behind it."""
    return [f"{layout}{variant}" for layout in GPU_LAYOUTS for variant in ("", *(f".{name}" for name in VARIANTS))]


def measured_loads(runs: Runs) -> dict[str, dict[str, Any]]:
    """Loads by rate and layout."""
    found: dict[str, dict[str, Any]] = {}
    for rate in RATES:
        loads = ((layout, runs.load(layout, rate)) for layout in every_layout())
        found[rate] = {layout: load for layout, load in loads if load is not None}
    return found


def _unlike(loads: Sequence[Mapping[str, Any]]) -> str:
    """What else than their layouts differs between runs; empty where nothing is known to."""
    found = []
    starts = {load.get("machine", {}).get("start") for load in loads}
    if len(starts) > 1 or None in starts:
        found.append("NOT of one machine start, so other things differ")
    if len({load["num_prompts"] for load in loads}) > 1:
        found.append("NOT of the same part of the trace")
    return "; ".join(found)


def _what_ran(loads: Mapping[str, Mapping[str, Any]]) -> str:
    """Which part of the trace each run had, and how many requests."""
    lines = []
    for rate, by_layout in loads.items():
        for layout, load in by_layout.items():
            last, start = max(load["start_times"]), load.get("machine", {}).get("start") or "unknown"
            part = f"the first {last:.0f} s of" if last < CUT_BELOW_S else "all of"
            lines.append(
                f"- {layout} at {rate}/s a model: {part} the trace's arrivals, {load['completed']} of "
                f"{load['num_prompts']} requests served, machine start {start[:8]}"
            )
    told = "One run of each; intervals beside percentiles are drawn from its requests and say nothing about other runs."
    return "\n".join((told, "", *lines))


def _add_load(report: Report, layout: str, rate: str, result: Mapping[str, Any], models: Sequence[str]) -> None:
    add_load(report, layout, rate, result)
    if (last := max(result["start_times"])) < CUT_BELOW_S:
        report.notes[f"tokens_per_s.{layout}.{rate}"] = f"the first {last:.0f} s of the trace's arrivals"
    add_models_words(report, layout, rate, result, models)
    _add_company(report, layout, rate, result)
    for model, sent in result["realised_rates"].items():
        report.metric(f"sent_rps.{layout}.{model}.{rate}", sent)


def _add_company(report: Report, layout: str, rate: str, result: Mapping[str, Any]) -> None:
    """Times between tokens by what else was under way."""
    for model in result["realised_rates"] if "itls" in result else ():
        by_company = gaps_by_company(result, model)
        count = sum(map(len, by_company.values()))
        for company, gaps_ms in by_company.items():
            if len(gaps_ms) >= FEWEST_GAPS:
                name = f"tbt_{company}_ms.{layout}.{model}.{rate}"
                told = f"{100 * len(gaps_ms) / count:.0f} % of the gaps; P99 {float(np.quantile(gaps_ms, 0.99)):.1f}"
                report.metric(f"{name}.p50", float(np.median(gaps_ms)), note=told)


def _add_lone_figures(report: Report, runs: Runs, layout: str, models: Sequence[str]) -> None:
    """One request alone, and memory."""
    for model in models:
        alone = runs.find(f"alone_{layout}_{model}")
        if alone is not None:
            note = f"one request at 4,096 tokens; vLLM whole on one GPU {VLLM_ALONE_MS.get(model, 0):.2f}"
            report.metric(f"alone_tbt_ms.{layout}.{model}.4k.p50", median(alone["gaps_ms"]), note=note)
    memory = runs.find(f"memory_{layout}")
    if memory is not None:
        for gpu, held in enumerate(memory["gpus"]):
            report.metric(f"gpu_used_gib.{layout}.{gpu}", held["used"] / GiB, limit=held["total"] / GiB)
        note = "account of the memory that was in use; nobody held so many"
        for model, room in kv_room(memory, layout, models).items():
            report.metric(f"one_request_tokens.{model}.{layout}", tokens_in(model, room), note=note)


def _add_computed_requests(report: Report, models: Sequence[str], kv_pool_bytes: str) -> None:
    """The longest requests of layouts that were not served, on as many GPUs as nobody had."""
    note = "computed from the models' shapes; NOT measured, no such machine was there"
    for layout in UNSERVED:
        flags = (*GPU_LAYOUTS[layout], "--backend", "cuda", "--weights", "random", "--kv-pool-bytes", kv_pool_bytes)
        memory = as_memory(deployment(flags, models))
        for model, room in kv_room(memory, layout, models).items():
            name = f"one_request_tokens.{model}.{layout}"
            if name not in report.metrics:
                report.metric(name, tokens_in(model, room), note=note)


def decode_lanes(layout: str, models: Sequence[str]) -> int:
    """As the server of a layout, or of a variant of it, has them."""
    name, _, variant = layout.partition(".")
    flags = (*GPU_LAYOUTS[name], *(VARIANTS[variant] if variant else ()), "--backend", "cuda")
    return deployment(flags, models).scheduling.num_decode_lanes


def add_models_words(report: Report, layout: str, rate: str, result: Mapping[str, Any], models: Sequence[str]) -> None:
    """What planner and simulator say of the same requests, beside what was seen."""
    if not result["completed"] or "kv_samples" not in result or not set(result["request_models"]) <= set(CONFIGS):
        return
    count = num_gpus(layout)
    gpus: dict[str, Any] = {"count": 1} if count == 1 else {"count": count, "kv": 1}
    demand, held = kv_demand(result, gpus), kv_held(result)
    interval = f"planned {demand.value / MiB:.0f}, between {demand.low / MiB:.0f} and {demand.high / MiB:.0f}"
    report.metric(f"k_pool_mib.{layout}.{rate}.p99", held / MiB, note=f"{interval}; whole pages, over the run's time")
    is_within = float(demand.low <= held <= demand.high)
    report.metric(f"k_pool_within.{layout}.{rate}", is_within, note=f"held {held / MiB:.0f} MiB at P99; {interval}")
    note = "the plan over what was held; each request's stay as the run saw it"
    if held:
        report.metric(f"k_pool_error_percent.{layout}.{rate}", 100.0 * (demand.value / held - 1.0), note=note)
    kind, share = layout.partition("-")[0], beside_share(layout)
    if "." in layout and not share:
        return  # of variants the simulator has those that set shares
    stages = stage_times(is_present=has_present_kernels(result))
    lanes = decode_lanes(layout, models)
    groups = simulated(result, gpus, cast(Layout, kind), stages, models, share, lanes)
    by_bytes = simulated(result, gpus, cast(Layout, kind), {}, models, share, lanes)
    for model, figures in result["models"].items():
        if model in groups[0].models:
            for level, share in (("p50", 0.5), ("p99", 0.99)):
                every_ms = _quantiles_ms(groups, model, share)
                error = 100.0 * (median(every_ms) / figures["tbt_ms"][level]["value"] - 1.0)
                name = f"sim_error_percent.{layout}.{model}.{rate}.{level}"
                told = f"of TBT; simulated {median(every_ms):.1f} ms, {min(every_ms):.1f} to {max(every_ms):.1f}"
                report.metric(name, error, limit=SIMULATED_PERCENT, note=told)
                floor_ms = median(_quantiles_ms(by_bytes, model, share))
                seen = f"tbt_ms.{layout}.{model}.{rate}.{level}"
                if seen in report.notes:
                    report.notes[seen] += f"; by bytes alone {floor_ms:.1f} (simulated with the roofline)"
    report.notes[f"k_pool_mib.{layout}.{rate}.p99"] += f"; simulated {kv_simulated(groups) / MiB:.0f}"
    for index, station in enumerate(groups[0].stations):
        busy = 1.0 - median(group.bubble_share(index) for group in groups)
        report.metric(
            f"sim_busy_share.{layout}.{station}.{rate}", busy, limit=1.0, note="of the time with steps in flight"
        )
    for level, share in (("p50", 0.5), ("p99", 0.99)):
        name = f"ttft_ms.{layout}.all.{rate}.{level}"
        told_ms = median(1e3 * group.total.ttft.quantile(share) for group in groups)
        if name in report.metrics:
            report.notes[name] = f"simulated {told_ms:.0f} ms"


def _quantiles_ms(groups: Sequence[GroupResult], model: str, share: float) -> list[float]:
    """Of the model's times between tokens in each of the simulations."""
    return [1e3 * group.models[model].tbt.quantile(share) for group in groups]


def add_outlook(report: Report, trace: Path, rate: str, models: Sequence[str] = ()) -> None:
    """The whole trace on two GPUs as the simulator has it: an expectation, under names of its own."""
    for layout in ("crosspool-1+1", "crosspool-1+1s", "static-2", "elastic-2"):
        kind = cast(Layout, layout.partition("-")[0])
        share = beside_share(layout)
        stages = stage_times(is_present=True)
        group = outlook(trace, {"count": 2, "kv": 1}, kind, stages, models, beside_share=share)
        for model, figures in group.models.items():
            for level, share in (("p50", 0.5), ("p99", 0.99)):
                name = f"simulated_tbt_ms.{layout}.{model}.{rate}.{level}"
                report.metric(name, 1e3 * figures.tbt.quantile(share), note="simulated with measured stage times")
        total = group.total
        report.metric(f"simulated_ttft_ms.{layout}.all.{rate}.p50", 1e3 * total.ttft.quantile(0.5), note="simulated")
        report.metric(f"simulated_tokens_per_s.{layout}.{rate}", total.num_tokens / group.duration_s, note="simulated")


def _is_error_of(name: str, layout: str, level: str) -> bool:
    return name.startswith(f"sim_error_percent.{layout}.") and name.endswith(f".{level}")


def _same_words(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> float | None:
    """Share of words at which two layouts' greedy answers agree up to the first that differs."""
    if first is None or second is None:
        return None
    same = total = 0
    for ours, theirs in zip(first["words"], second["words"], strict=True):
        total += len(ours)
        same += next(
            (place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours)
        )
    return same / total
