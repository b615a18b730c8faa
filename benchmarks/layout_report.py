"""The kept result of `bench_layouts_gpu` from its measurements, with the targets as limits."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.bench_layouts import add_load, add_ratios
from benchmarks.layout_memory import kv_room, tokens_in
from benchmarks.layout_runs import Runs
from benchmarks.report import Report
from crosspool.units import GiB

LAYOUTS = ("crosspool-1+1", "static-2", "elastic-2")
RATES = ("0.8", "2.0")
TARGETS = {"tbt_ms.{layout}.{model}.0.8.p50": 22.0, "tbt_ms.{layout}.{model}.0.8.p99": 42.0}
TTFT_TARGET_MS = 170.0
VLLM_ALONE_MS = {"qwen3-30b-a3b": 4.49, "glm-4.7-flash": 5.46, "deepseek-v2-lite": 3.40}
"""vLLM 0.24, whole on one such GPU, one request at 4,096 tokens."""
PEERS_P99_MS = {
    "vllm static, 2,048 tokens a step": {"qwen3-30b-a3b": 15.5, "glm-4.7-flash": 119.0, "deepseek-v2-lite": 12.3},
}


def layouts_report(runs: Runs, models: Sequence[str], kv_pool_bytes: str) -> Report:
    """A report of whatever has been measured."""
    config: dict[str, Any] = {"models": list(models), "kv_pool_bytes": kv_pool_bytes, "temperature": 1.0}
    report = Report("layouts", hardware="h200-x2", config=config, seed=2026)
    for layout in LAYOUTS:
        for rate in RATES:
            result = runs.find(f"load_{layout}_{rate}")
            if result is not None:
                add_load(report, layout, rate, result)
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
    add_ratios(report, models, RATES)
    return report
