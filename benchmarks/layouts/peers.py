"""What other engines showed under the same kind of load, on another day: beside our figures, dated and marked.

Two H200s of one host, 2026-11-29: vLLM 0.24.0 (TP1, Qwen3 on one GPU, both others on the second; 8,192 tokens a step)
and vLLM with kvcached 0.1.6 (TP2, one elastic pool of 40 GiB a GPU); 50 s of Poisson arrivals with ShareGPT's lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import Report

NOTE = (
    "2026-11-29, one run, not beside ours: 50 s of other arrivals; dummy weights whose routing collapses onto few "
    "experts, which flatters it"
)
LEVELS = ("p50", "p95", "p99")

TBT_MS: dict[tuple[str, str], dict[str, tuple[float, float, float]]] = {
    ("vllm-static-2", "0.8"): {
        "qwen3-30b-a3b": (12.4, 14.4, 70.0),
        "glm-4.7-flash": (15.0, 16.4, 124.0),
        "deepseek-v2-lite": (7.1, 9.1, 10.5),
    },
    ("vllm-static-2", "2.0"): {
        "qwen3-30b-a3b": (15.9, 19.3, 97.0),
        "glm-4.7-flash": (13.5, 18.3, 157.0),
        "deepseek-v2-lite": (8.0, 10.9, 90.0),
    },
    ("kvcached-2", "0.8"): {
        "qwen3-30b-a3b": (28.2, 540.0, 632.0),
        "glm-4.7-flash": (23.1, 367.0, 620.0),
        "deepseek-v2-lite": (12.9, 99.0, 360.0),
    },
    ("kvcached-2", "2.0"): {
        "qwen3-30b-a3b": (38.6, 578.0, 633.0),
        "glm-4.7-flash": (32.0, 501.0, 604.0),
        "deepseek-v2-lite": (18.2, 301.0, 374.0),
    },
}
"""By engine and rate: time between tokens of each model, P50, P95, P99."""
TTFT_AND_TOKENS: dict[tuple[str, str], tuple[float, float, float]] = {
    ("vllm-static-2", "0.8"): (167.0, 2403.0, 1310.0),
    ("vllm-static-2", "2.0"): (158.0, 2142.0, 3079.0),
    ("kvcached-2", "0.8"): (758.0, 5463.0, 874.0),
    ("kvcached-2", "2.0"): (633.0, 1682.0, 2079.0),
}
"""Time to first token of all models, P50 and P99 in ms, and output tokens/s."""


def add_peers(report: Report, models: Sequence[str], rates: Sequence[str]) -> None:
    """Under the names that `peers/bench_peers.py` would give them, for the rates that our layouts were measured at."""
    for (peer, rate), by_model in TBT_MS.items():
        if rate not in rates:
            continue
        for model in models:
            for level, value in zip(LEVELS, by_model.get(model, ()), strict=False):
                report.metric(f"tbt_ms.{peer}.{model}.{rate}.{level}", value, note=NOTE)
        first, late, tokens = TTFT_AND_TOKENS[peer, rate]
        report.metric(f"ttft_ms.{peer}.all.{rate}.p50", first, note=NOTE)
        report.metric(f"ttft_ms.{peer}.all.{rate}.p99", late, note=NOTE)
        report.metric(f"tokens_per_s.{peer}.{rate}", tokens, note=NOTE)
