"""`benchmarks/bench_layouts.py`: the same load for every layout, and metrics under their published names."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.bench_layouts import bench_settings
from benchmarks.layouts.figures import add_layout_ratios, add_load
from benchmarks.layouts.server import LAYOUTS
from benchmarks.report import Report
from crosspool.bench.requests import planned_requests
from crosspool.commands.serve import deployment
from crosspool.deployment.ranks import kv_bytes_of_each, kv_ranks

MODELS = ("austen", "holmes", "shakespeare")


def arguments(trace_dir=None):
    return argparse.Namespace(seconds=50.0, max_model_len=1000, seed=1, trace_dir=trace_dir, length_scale=0.1)


def test_every_layout_has_the_same_kv_memory():
    totals = set()
    for flags in LAYOUTS.values():
        given = {flag[2:].replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
        config = deployment([], [], None, {**given, "kv_pool_bytes": "48MiB"})
        totals.add(kv_bytes_of_each(config) * len(kv_ranks(config)))
    assert totals == {48 * 2**20}


def test_drawn_requests_are_as_many_and_as_long_as_asked():
    planned = planned_requests(bench_settings(arguments(), ("http://x",), MODELS, "2.0"), MODELS)
    assert len(planned) == pytest.approx(3 * 2.0 * 50, rel=0.2)
    assert sum(request.prompt_tokens for request in planned) / len(planned) == pytest.approx(86, rel=0.1)
    assert sum(request.output_tokens for request in planned) / len(planned) == pytest.approx(58, rel=0.1)


def test_a_traces_models_are_the_served_ones(tmp_path):
    rows = [{"t": 0.1 * number, "model": name, "in": 900, "out": 600} for number, name in enumerate("zyx")]
    (tmp_path / "sharegpt_0.8.jsonl").write_text("\n".join(map(json.dumps, rows)))
    planned = planned_requests(bench_settings(arguments(tmp_path), ("http://x",), MODELS, "0.8"), MODELS)
    assert [(r.model, r.prompt_tokens, r.output_tokens) for r in planned] == [
        ("shakespeare", 90, 60),
        ("holmes", 90, 60),
        ("austen", 90, 60),
    ]


def test_metrics_have_their_published_names():
    report = Report("layouts", hardware="cpu")
    for layout, p99 in (("crosspool-1+1", 10.0), ("elastic-2", 85.0)):
        levels = {key: {"value": p99, "low": p99, "high": p99} for key in ("p50", "p95", "p99")}
        result = {
            "models": {"all": {"ttft_ms": levels}, "austen": {"tbt_ms": levels}},
            "output_throughput": 5.0,
            "completed": 9,
            "num_prompts": 10,
            "client": {"loop_lag_p99_ms": 0.1},
        }
        add_load(report, layout, "0.8", result)
    add_layout_ratios(report, MODELS, ("0.8",), ("static-2", "elastic-2"))
    for name in ("tbt_ms.elastic-2.austen.0.8.p95", "ttft_ms.elastic-2.all.0.8.p50", "tokens_per_s.elastic-2.0.8"):
        assert name in report.metrics
    assert report.metrics["served.crosspool-1+1.0.8"] == 0.9
    assert report.metrics["elastic_over_crosspool.austen.0.8"] == 8.5
