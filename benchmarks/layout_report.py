"""The kept result of `bench_layouts_gpu` from its measurements, with the targets as limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.bench_layouts import add_load, add_ratios
from benchmarks.full_models import CONFIGS
from benchmarks.layout_memory import kv_room, tokens_in
from benchmarks.layout_models import kv_demand, kv_held, outlook, simulated, stage_times
from benchmarks.layout_runs import Runs
from benchmarks.layout_server import GPU_LAYOUTS
from benchmarks.report import Report
from crosspool.simulator.group import Layout
from crosspool.units import GiB, MiB

RATES = ("0.8", "2.0")
VLLM_ALONE_MS = {"qwen3-30b-a3b": 4.49, "glm-4.7-flash": 5.46, "deepseek-v2-lite": 3.40}
"""vLLM 0.24, whole on one such GPU, one request at 4,096 tokens."""
CUT_BELOW_S = 90.0
"""A run whose last request came before is told to be a part of its trace."""


def layouts_report(runs: Runs, models: Sequence[str], config: Mapping[str, Any], commit: str | None = None) -> Report:
    """A report of whatever has been measured, with the machine of the last run."""
    machines = runs.machines()
    num_gpus = max((len(machine["hardware"]["gpus"]) for machine in machines), default=0)
    hardware = "h200" if num_gpus < 2 else f"h200-x{num_gpus}"
    facts = {"models": list(models), "temperature": 1.0, **config}
    origin = {**(machines[-1] if machines else {}), **({"commit": commit} if commit else {})}
    report = Report("layouts", hardware=hardware, config=facts, seed=2026, origin=origin)
    for layout in GPU_LAYOUTS:
        for rate in RATES:
            result = runs.load(layout, rate)
            if result is not None:
                add_load(report, layout, rate, result)
                if (last := max(result["start_times"])) < CUT_BELOW_S:
                    report.notes[f"tokens_per_s.{layout}.{rate}"] = f"the first {last:.0f} s of the trace's arrivals"
                add_models_words(report, layout, rate, result)
                for model, sent in result["realised_rates"].items():
                    report.metric(f"sent_rps.{layout}.{model}.{rate}", sent)
        for model in models:
            alone = runs.find(f"alone_{layout}_{model}")
            if alone is not None:
                note = f"one request at 4,096 tokens; vLLM whole on one GPU {VLLM_ALONE_MS.get(model, 0):.2f}"
                report.metric(f"alone_tbt_ms.{layout}.{model}.4k.p50", median(alone["gaps_ms"]), note=note)
        memory = runs.find(f"memory_{layout}")
        if memory is not None:
            for gpu, held in enumerate(memory["gpus"]):
                report.metric(f"gpu_used_gib.{layout}.{gpu}", held["used"] / GiB, limit=held["total"] / GiB)
            for model, room in kv_room(memory, layout, models).items():
                report.metric(f"one_request_tokens.{model}.{layout}", tokens_in(model, room), note="account of memory")
    ours = "crosspool-1+1" if num_gpus > 1 else "crosspool-1"
    theirs = [f"{kind}-{max(1, num_gpus)}" for kind in ("static", "elastic")]
    errors = [abs(report.metrics[name]) for name in report.metrics if _is_error_of(name, ours, "p99")]
    if errors:
        note = f"of {ours}'s TBT, the model that is furthest off"
        report.metric("sim_error_percent.p99", max(errors), limit=15.0, note=note)
    add_ratios(report, models, RATES, ours, theirs)
    _mark_other_starts(report, runs, ours, theirs)
    for layout in theirs:
        for model in models:
            same = _same_words(runs.find(f"answers_{ours}_{model}"), runs.find(f"answers_{layout}_{model}"))
            if same is not None:
                report.metric(f"same_tokens.{layout}.{model}", same, limit=1.0, note=f"share, greedy, as {ours} gives")
    return report


def add_models_words(report: Report, layout: str, rate: str, result: Mapping[str, Any]) -> None:
    """What planner and simulator say of the same requests, beside what was seen."""
    if "kv_samples" not in result or not set(result["request_models"]) <= set(CONFIGS):
        return
    gpus: dict[str, Any] = {"count": 1} if layout.endswith("-1") else {"count": 2, "kv": 1}
    demand, held = kv_demand(result, gpus), kv_held(result)
    interval = f"planned {demand.value / MiB:.0f}, between {demand.low / MiB:.0f} and {demand.high / MiB:.0f}"
    report.metric(f"k_pool_mib.{layout}.{rate}.p99", held / MiB, note=f"{interval}; whole pages, over the run's time")
    kind = layout.partition("-")[0]
    group = simulated(result, gpus, cast(Layout, kind), stage_times())
    for model, figures in result["models"].items():
        if model in group.models:
            for level, share in (("p50", 0.5), ("p99", 0.99)):
                told_ms = 1e3 * group.models[model].tbt.quantile(share)
                error = 100.0 * (told_ms / figures["tbt_ms"][level]["value"] - 1.0)
                name = f"sim_error_percent.{layout}.{model}.{rate}.{level}"
                report.metric(name, error, limit=15.0, note=f"of TBT; simulated {told_ms:.1f} ms")


def add_outlook(report: Report, trace: Path, rate: str) -> None:
    """The whole trace on two GPUs as the simulator has it: an expectation, under names of its own."""
    for layout in ("crosspool-1+1", "static-2", "elastic-2"):
        kind = cast(Layout, layout.partition("-")[0])
        group = outlook(trace, {"count": 2, "kv": 1}, kind, stage_times())
        for model, figures in group.models.items():
            for level, share in (("p50", 0.5), ("p99", 0.99)):
                name = f"simulated_tbt_ms.{layout}.{model}.{rate}.{level}"
                report.metric(name, 1e3 * figures.tbt.quantile(share), note="simulated with measured stage times")
        total = group.total
        report.metric(f"simulated_ttft_ms.{layout}.all.{rate}.p50", 1e3 * total.ttft.quantile(0.5), note="simulated")
        report.metric(f"simulated_tokens_per_s.{layout}.{rate}", total.num_tokens / group.duration_s, note="simulated")


def _mark_other_starts(report: Report, runs: Runs, ours: str, theirs: Sequence[str]) -> None:
    """Say so beside ratios of figures that are not known to be of one start of a machine."""
    for rate in RATES:
        base = runs.load(ours, rate)
        for layout in theirs:
            other = runs.load(layout, rate)
            if base is None or other is None:
                continue
            starts = {run.get("machine", {}).get("start") for run in (base, other)}
            if len(starts) == 1 and None not in starts:
                continue
            prefix = f"{layout.partition('-')[0]}_over_crosspool."
            for name in report.metrics:
                if name.startswith(prefix) and name.endswith(f".{rate}"):
                    report.notes[name] = "P99 of TBT; NOT of one machine start, so other things differ too"


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
