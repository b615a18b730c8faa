"""What a layout's GPUs would hold, and the plan of a run, where nothing is started."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import bench_layouts_gpu
from benchmarks.layouts.account import as_memory, deployment
from benchmarks.layouts.memory import kv_room, tokens_in
from benchmarks.layouts.server import GPU_LAYOUTS
from crosspool.units import GiB

MODELS = ("glm-4.7-flash", "qwen3-30b-a3b", "deepseek-v2-lite")


def plan(monkeypatch, capsys, traces, *loads):
    words = ["bench", "--trace-dir", str(traces), "--runs", str(traces / "runs"), "--kv-pool-bytes", "40GiB"]
    words += ["--plan", *loads]
    monkeypatch.setattr(sys, "argv", words)
    code = bench_layouts_gpu.main()
    return code, capsys.readouterr().out


@pytest.fixture
def traces(tmp_path):
    rows = [{"t": 0.5 * number, "model": name, "in": 300, "out": 40} for number in range(6) for name in MODELS]
    (tmp_path / "sharegpt_0.8.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_a_plan_of_four_gpus_needs_none(traces, monkeypatch, capsys):
    loads = ("crosspool-1+3:0.8", "crosspool-1+3.resident:0.8:1", "static-4:0.8", "elastic-4:0.8")
    code, told = plan(monkeypatch, capsys, traces, *loads)
    assert code == 0
    assert not (traces / "runs").exists()
    assert told.count("crosspool serve") == 4
    assert "crosspool-1+3.resident: crosspool serve" in told
    assert "--control resident" in told
    assert "18 requests in 2 s; deepseek-v2-lite 2.40/s, glm-4.7-flash 2.40/s" in told
    assert "GPU 3: w2: weights 44.8, KV 0.0, beside 4.0; 48.8 of 140.4 GiB" in told
    assert "GPU 3: nothing" in told, "three whole models leave a GPU of the static layout idle"
    assert "load_static-4_0.8: 18 requests in 2 s" in told
    assert "load_crosspool-1+3.resident_0.8_1s: 6 requests in 0 s" in told


def test_a_plan_says_what_does_not_fit_and_which_trace_is_missing(traces, monkeypatch, capsys):
    code, told = plan(monkeypatch, capsys, traces, "static-1:0.8")
    assert code == 1
    assert "DOES NOT FIT" in told
    code, told = plan(monkeypatch, capsys, traces, "crosspool-1+1:2.0")
    assert code == 1
    assert "error: cannot read" in told


def test_the_account_by_shapes_is_that_of_the_memory_that_was_measured():
    """Bytes in use of both H200s, KV memory handed out, as `memory_<layout>` of kept runs had them."""
    seen = {
        "crosspool-1+1": ([63608717312, 147306053632], {"kv0": 51539607552}),
        "static-2": ([132504354816, 81889591296], dict.fromkeys(("kv0", "kv1", "kv2"), 17179869184)),
        "elastic-2": ([125497769984, 90479525888], dict.fromkeys(("kv0", "kv1"), 25769803776)),
    }
    for layout, (used, kv_bytes) in seen.items():
        computed = as_memory(deployment((*GPU_LAYOUTS[layout], *bench_layouts_gpu.served_with("48GiB")), MODELS))
        assert computed["kv_bytes"] == kv_bytes
        for ours, theirs in zip(computed["gpus"], used, strict=True):
            assert ours["used"] == pytest.approx(theirs, abs=2 * GiB)
        measured = {"gpus": [{"used": value, "total": 150754820096} for value in used], "kv_bytes": kv_bytes}
        rooms = (kv_room(memory, layout, MODELS) for memory in (computed, measured))
        tokens = [{model: tokens_in(model, room) for model, room in found.items()} for found in rooms]
        assert tokens[0] == pytest.approx(tokens[1], rel=0.04)


def test_some_of_the_models_may_be_left_out(traces, monkeypatch, capsys):
    code, told = plan(monkeypatch, capsys, traces, "static-1:0.8", "--models", *MODELS[1:])
    assert code == 0
    assert "GPU 0: kv0 kv1 w0 w1: weights 86.2" in told
    assert "12 requests in 2 s; deepseek-v2-lite 2.40/s, qwen3-30b-a3b 2.40/s" in told
