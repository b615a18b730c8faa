"""The kept result of `bench_layouts_gpu` from its measurements, with the targets as limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.bench_layouts import add_load, add_ratios
from benchmarks.layout_memory import kv_room, tokens_in
from benchmarks.layout_runs import Runs
from benchmarks.layout_server import GPU_LAYOUTS
from benchmarks.report import Report
from crosspool.units import GiB

RATES = ("0.8", "2.0")
VLLM_ALONE_MS = {"qwen3-30b-a3b": 4.49, "glm-4.7-flash": 5.46, "deepseek-v2-lite": 3.40}
"""vLLM 0.24, whole on one such GPU, one request at 4,096 tokens."""
CUT_BELOW_S = 90.0
"""A run whose last request came before is told to be a part of its trace."""


def layouts_report(runs: Runs, models: Sequence[str], config: Mapping[str, Any]) -> Report:
    """A report of whatever has been measured, with the machine of the last run."""
    machines = runs.machines()
    num_gpus = max((len(machine["hardware"]["gpus"]) for machine in machines), default=0)
    hardware = "h200" if num_gpus < 2 else f"h200-x{num_gpus}"
    facts = {"models": list(models), "temperature": 1.0, **config}
    report = Report("layouts", hardware=hardware, config=facts, seed=2026, origin=machines[-1] if machines else {})
    for layout in GPU_LAYOUTS:
        for rate in RATES:
            result = runs.find(f"load_{layout}_{rate}")
            if result is not None:
                add_load(report, layout, rate, result)
                if (last := max(result["start_times"])) < CUT_BELOW_S:
                    report.notes[f"tokens_per_s.{layout}.{rate}"] = f"the first {last:.0f} s of the trace's arrivals"
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
    add_ratios(report, models, RATES, ours, theirs)
    for layout in theirs:
        for model in models:
            same = _same_words(runs.find(f"answers_{ours}_{model}"), runs.find(f"answers_{layout}_{model}"))
            if same is not None:
                report.metric(f"same_tokens.{layout}.{model}", same, limit=1.0, note=f"share, greedy, as {ours} gives")
    return report


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
