"""`benchmarks/bench_layouts_gpu.py`: what is run, what is kept, and the account of memory."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import bench_layouts_gpu
from benchmarks.bench_layouts_gpu import Load
from benchmarks.layouts import predicted
from benchmarks.layouts.memory import FRAME_BYTES, RESERVE_BYTES, kv_room, tokens_in
from benchmarks.layouts.predicted import (
    has_present_kernels,
    kv_demand,
    kv_held,
    outlook,
    rows_of_passes,
    simulated,
    stage_times,
)
from benchmarks.layouts.report import add_outlook, decode_lanes, layouts_report
from benchmarks.layouts.runs import Runs
from benchmarks.layouts.server import GPU_LAYOUTS, beside_share
from benchmarks.report import Report
from crosspool.backends.cuda.steps.passes import BUCKETS
from crosspool.units import GiB

MODELS = ("glm-4.7-flash", "qwen3-30b-a3b", "deepseek-v2-lite")


def test_a_load_names_layout_rate_and_seconds(tmp_path):
    load = Load.parse("crosspool-1+1.resident:0.8:30")
    assert (load.name, load.flags) == ("load_crosspool-1+1.resident_0.8_30s", ("--control", "resident"))
    settings = load.settings("http://x", tmp_path, MODELS)
    assert (settings.trace.name, settings.duration_s, settings.temperature) == ("sharegpt_0.8.jsonl", 30.0, 1.0)
    assert Load.parse("static-2:2.0").name == "load_static-2_2.0"
    for wrong in ("static-2", "static:0.8", "crosspool-1+1.fast:0.8"):
        with pytest.raises(ValueError, match="give LAYOUT:RATE"):
            Load.parse(wrong)


def test_every_layout_names_its_gpus():
    gpus = {name: flags[-1] for name, flags in GPU_LAYOUTS.items()}
    assert gpus["crosspool-1+1"] == gpus["crosspool-1+1s"] == gpus["static-2"] == gpus["elastic-2"] == "2"
    assert gpus["crosspool-1+3"] == gpus["static-4"] == "4"
    assert gpus["crosspool-1"] == gpus["static-1"] == gpus["elastic-1"] == "1"


def test_a_share_beside_attention_is_read_from_the_flags():
    assert beside_share("crosspool-1+1") == beside_share("crosspool-1+1.5to3") == beside_share("static-2") == 0
    assert beside_share("crosspool-1+1s") == 0.25
    assert beside_share("crosspool-1+1s.3lanes") == 0.25
    assert beside_share("crosspool-1+1s.5to3") == 0.375


def test_a_layout_that_fails_does_not_stop_the_others_and_the_report_may_wait(tmp_path, monkeypatch, capsys):
    tried = []

    def measure(args, runs, layout, loads, directories):
        tried.append((layout, [load.rate for load in loads]))
        if layout == "elastic-2":
            raise RuntimeError("the server ended with 1")

    monkeypatch.setattr(bench_layouts_gpu, "measure", measure)
    monkeypatch.setattr(bench_layouts_gpu, "gpu_memory", lambda: [("H200", 0, 1)])
    words = ["bench", "--trace-dir", str(tmp_path), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    loads = ["elastic-2:0.8", "crosspool-1+1s:0.8:30", "crosspool-1+1s:2.0"]
    monkeypatch.setattr(sys, "argv", [*words, "--measure-only", *loads])
    assert bench_layouts_gpu.main() == 1
    assert tried == [("elastic-2", ["0.8"]), ("crosspool-1+1s", ["0.8", "2.0"])]
    assert "elastic-2: FAILED: the server ended with 1" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    bench_layouts_gpu.Runs(tmp_path / "runs").get("load_crosspool-1+1_0.8_10s", lambda: run_of(MODELS[1:], 2))
    monkeypatch.setattr(sys, "argv", [*words, "--note", "Cut short."])
    assert bench_layouts_gpu.main() == 0
    (report,) = (tmp_path / "out").glob("layouts_*.md")
    assert "Cut short.\n\nOne run of each" in report.read_text()


def test_without_a_gpu_the_same_layouts_run_on_cpus_and_the_command_says_so(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(bench_layouts_gpu, "gpu_memory", lambda: [])
    monkeypatch.setattr(bench_layouts_gpu.bench_layouts, "main", lambda words: asked.append(words) or 0)
    words = ["bench", "--trace-dir", "traces", "--runs", str(tmp_path / "runs"), "--out", "o", "--port", "9"]
    loads = ["crosspool-1+1:0.8:5", "crosspool-1+1.resident:2.0:7", "crosspool-1:0.8", "static-2:0.8:5"]
    monkeypatch.setattr(sys, "argv", [*words, *loads])
    assert bench_layouts_gpu.main() == 0
    told = ["--layouts", "crosspool-1+1", "static-2", "--rates", "0.8", "2.0", "--trace-dir", "traces"]
    assert asked == [[*told, "--seconds", "20", "--port", "9", "--out", "o"]]
    assert "there is no GPU here: the NumPy backend serves the demo models" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*words, "crosspool-1:0.8"])
    assert bench_layouts_gpu.main() == 1
    assert "none of these layouts runs on CPUs" in capsys.readouterr().out


def test_what_was_measured_is_found_again(tmp_path):
    calls = []
    runs = Runs(tmp_path / "runs")
    for _ in range(2):
        found = runs.get("x", lambda: calls.append(1) or {"value": 3})
    assert (found["value"], len(calls)) == (3, 1)
    assert runs.machines()[0]["hardware"]["num_cores"] >= 1


def test_one_request_gets_the_memory_that_the_layout_gives_it():
    gpus = [{"used": used * GiB, "total": 140 * GiB} for used in (90, 80)]
    memory = {"gpus": gpus, "kv_bytes": {"kv0": 10 * GiB, "kv1": 20 * GiB, "kv2": 12 * GiB}}
    static = kv_room(memory, "static-2", MODELS)
    assert static["glm-4.7-flash"] == static["deepseek-v2-lite"] == (140 - 90 + 22) * GiB // 2 - RESERVE_BYTES // 2
    assert static["qwen3-30b-a3b"] == (140 - 80 + 20) * GiB - RESERVE_BYTES
    elastic = kv_room({"gpus": gpus, "kv_bytes": {"kv0": 22 * GiB, "kv1": 20 * GiB}}, "elastic-2", MODELS)
    assert elastic["glm-4.7-flash"] == 2 * static["glm-4.7-flash"]
    pools = kv_room({"gpus": gpus, "kv_bytes": {"kv0": 60 * GiB}}, "crosspool-1+1", MODELS)
    assert set(pools.values()) == {(140 - 90 + 60) * GiB - RESERVE_BYTES}


def test_tokens_are_whole_pages_beside_frame_0():
    assert tokens_in("qwen3-30b-a3b", 13 * FRAME_BYTES) == 256
    assert tokens_in("qwen3-30b-a3b", 12 * FRAME_BYTES) == 0


def run_of(models, seconds=10.0):
    """A measured load as `loaded` keeps it: a request a second of each model."""
    count = int(seconds)
    tbt = {
        "mean": 10.0,
        "p50": {"value": 9.0, "low": 8.0, "high": 10.0},
        "p99": {"value": 20.0, "low": 8.0, "high": 30.0},
    }
    tbt["p95"] = tbt["p99"]
    return {
        "request_models": [model for model in models for _ in range(count)],
        "start_times": [float(second) for _ in models for second in range(count)],
        "input_lens": [500] * count * len(models),
        "output_lens": [200] * count * len(models),
        "ttfts": [0.05] * count * len(models),
        "itls": [[0.01] * 200] * count * len(models),
        "total_input_tokens": 500 * count * len(models),
        "completed": count * len(models),
        "num_prompts": count * len(models),
        "duration": seconds + 2.0,
        "output_throughput": 100.0,
        "realised_rates": dict.fromkeys(models, 1.0),
        "client": {"loop_lag_p99_ms": 1.0},
        "models": {
            "all": {"tbt_ms": tbt, "ttft_ms": {"mean": 50.0, **{key: tbt[key] for key in ("p50", "p99")}}},
            **{model: {"tbt_ms": tbt} for model in models},
        },
        "kv_samples": [{"at_s": float(at), "used_bytes": {"kv0": at * 1e6, "kv1": 1e6}} for at in range(101)],
    }


def test_a_run_is_compared_with_what_planner_and_simulator_say_of_its_requests(tmp_path):
    models = ("qwen3-30b-a3b", "deepseek-v2-lite")
    run = run_of(models)
    assert kv_held(run) == pytest.approx(100e6)
    demand = kv_demand(run, {"count": 1})
    # each stays for 2.05 s, so three overlap for a moment, with 500 to 700 tokens of 96 + 32 KiB in pages of 256
    assert demand.value == pytest.approx((512 + 768 + 768) * 128 * 1024, rel=0.05)
    assert demand.low <= demand.value <= demand.high
    groups = simulated(run, {"count": 1}, "static", {})
    for group in groups:
        assert {name: found.num_finished for name, found in group.models.items()} == dict.fromkeys(models, 10)
    assert len({group.total.residence.mean for group in groups}) > 1, "arrivals differ between the simulations"
    runs = Runs(tmp_path)
    runs.get("load_static-1_0.8_10s", lambda: run)
    report = layouts_report(runs, models, {})
    assert report.metrics["k_pool_mib.static-1.0.8.p99"] == pytest.approx(100e6 / 2**20)
    assert report.metrics["k_pool_error_percent.static-1.0.8"] == pytest.approx(100 * (demand.value / 100e6 - 1))
    assert "sim_error_percent.p99" not in report.metrics, "of the two pools, which were not run"
    name = "sim_error_percent.static-1.deepseek-v2-lite.0.8.p50"
    told_ms = float(report.notes[name].split()[3])
    assert report.metrics[name] == pytest.approx(100 * (told_ms / 9.0 - 1), abs=1.0)


def test_the_plan_takes_each_requests_stay_as_the_run_saw_it():
    """Requests that stay longer while others are there hold more at the peak than the mean speed tells."""
    run = run_of(("qwen3-30b-a3b",))
    even = kv_demand(run, {"count": 1})
    slow = {**run, "itls": [[0.03 if number in (4, 5) else 0.01] * 200 for number in range(10)], "duration": 16.0}
    peak = kv_demand(slow, {"count": 1})
    mean_s = sum(map(sum, slow["itls"])) / 2000
    steady = kv_demand({**slow, "itls": [[mean_s] * 200] * 10}, {"count": 1})
    assert peak.value > steady.value > 0.9 * even.value


def test_a_request_that_was_refused_held_nothing():
    run = run_of(("qwen3-30b-a3b",))
    refused = {**run, "ttfts": [0.0, *run["ttfts"][1:]], "itls": [[], *run["itls"][1:]], "output_lens": [0] + [200] * 9}
    assert kv_demand(refused, {"count": 1}).value <= kv_demand(run, {"count": 1}).value
    assert simulated(refused, {"count": 1}, "static", {})[0].total.num_finished == 10, "it is sent all the same"


def test_a_load_of_which_nothing_was_served_is_told_as_that(tmp_path):
    run = {**run_of(("qwen3-30b-a3b",)), "completed": 0, "models": {"all": {}, "qwen3-30b-a3b": {}}}
    (tmp_path / "load_crosspool-1_0.8.json").write_text(json.dumps(run))
    report = layouts_report(Runs(tmp_path), ("qwen3-30b-a3b",), {})
    assert report.metrics["served.crosspool-1.0.8"] == 0
    assert not [name for name in report.metrics if name.startswith(("ttft_ms", "tbt_ms", "sim_error"))]


def test_an_outlook_has_names_of_its_own(tmp_path):
    rows = [{"t": 0.5 * number, "model": name, "in": 300, "out": 40} for number in range(6) for name in MODELS]
    (tmp_path / "sharegpt_0.8.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = Report("layouts", hardware="h200")
    add_outlook(report, tmp_path / "sharegpt_0.8.jsonl", "0.8")
    assert all(name.startswith("simulated_") for name in report.metrics), "nothing that looks measured"
    for layout in ("crosspool-1+1", "crosspool-1+1s", "static-2", "elastic-2"):
        for model in MODELS:
            p50, p99 = (report.metrics[f"simulated_tbt_ms.{layout}.{model}.0.8.{level}"] for level in ("p50", "p99"))
            assert 0.5 < p50 <= p99 < 200


def test_a_load_beyond_what_the_planner_would_accept_is_simulated_with_its_queues(tmp_path):
    rows = [{"t": 0.02 * number, "model": name, "in": 600, "out": 90} for number in range(60) for name in MODELS]
    trace = tmp_path / "sharegpt_2.0.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    group = outlook(trace, {"count": 2, "kv": 1}, "crosspool", stage_times(), MODELS)
    assert group.total.num_finished == 180
    assert group.total.queueing.quantile(0.99) > 0.1, "32 sequences of a model run at once"


def test_the_report_compares_layouts_of_as_many_gpus(tmp_path):
    runs = Runs(tmp_path)
    levels = {key: {"value": 10.0, "low": 9.0, "high": 11.0} for key in ("p50", "p95", "p99")}
    for layout, scale in (("crosspool-1", 1.0), ("static-1", 1.5), ("elastic-1", 9.0)):
        own = {key: {**value, "value": 10.0 * scale} for key, value in levels.items()}
        result = {
            "models": {"all": {"ttft_ms": levels}, "a": {"tbt_ms": own}},
            "output_throughput": 5.0,
            "completed": 9,
            "num_prompts": 9,
            "client": {"loop_lag_p99_ms": 0.1},
            "realised_rates": {"a": 0.8},
            "start_times": [0.0, 20.0],
            "request_models": ["a", "a"],
        }
        runs.get(f"load_{layout}_0.8", lambda result=result: result)
        words = ["x", "y"] if layout == "elastic-1" else ["x", "z"]
        runs.get(f"answers_{layout}_a", lambda words=words: {"words": [words, ["q", "r"]]})
    report = layouts_report(runs, ["a"], {})
    assert report.hardware == "h200"
    assert report.metrics["elastic_over_crosspool.a.0.8"] == 9.0
    assert report.metrics["static_over_crosspool.a.0.8"] == 1.5
    assert report.metrics["same_tokens.elastic-1.a"] == 0.75
    assert "first 20 s" in report.notes["tokens_per_s.static-1.0.8"]


@pytest.mark.parametrize(("starts", "is_marked"), [(("a", "a"), False), (("a", "b"), True), ((None, None), True)])
def test_ratios_over_different_machine_starts_are_marked(tmp_path, starts, is_marked):
    for layout, start in zip(("crosspool-1", "elastic-1"), starts, strict=True):
        run = {**run_of(("a",)), "machine": {"start": start, "hardware": {"gpus": ["x"]}}}
        (tmp_path / f"load_{layout}_0.8.json").write_text(json.dumps(run))
    report = layouts_report(Runs(tmp_path), ["a"], {})
    assert ("NOT of one machine start" in report.notes["elastic_over_crosspool.a.0.8"]) is is_marked


def test_lanes_of_a_model_that_was_not_measured_are_taken_to_be_as_efficient_as_anothers(tmp_path):
    metrics = {"pipeline_efficiency.qwen3-30b-a3b.b4.pause22.words": 0.9, "moe_us.glm-4.7-flash.b1.uniform.p50": 40.0}
    for name in ("lanes_h200", "moe_layer_h200"):
        (tmp_path / f"{name}_2026-11-30.json").write_text(json.dumps({"metrics": metrics}))
    table = stage_times(tmp_path)
    assert table["glm-4.7-flash"].lanes_efficiency == table["qwen3-30b-a3b"].lanes_efficiency == ((4, 0.9),)
    assert stage_times(tmp_path / "nothing") == {}


def test_present_ffns_take_the_place_of_all_that_were_measured_before(tmp_path):
    """Rows between those of the newest result are interpolated, not taken from slower kernels."""
    for name, metrics in (
        ("moe_layer_h200", {"moe_us.qwen3-30b-a3b.b1.uniform.p50": 40.0, "moe_us.qwen3-30b-a3b.b9.uniform.p50": 170.0}),
        ("moe_layer_fused_h200", {"moe_us.qwen3-30b-a3b.b1.uniform.p50": 30.0}),
    ):
        (tmp_path / f"{name}_2026-11-30.json").write_text(json.dumps({"metrics": metrics}))
    rows = [[at for at, _ in stage_times(tmp_path, is_present=now)["qwen3-30b-a3b"].ffn_s[1]] for now in (False, True)]
    assert rows == [[1, 9], [1]]


def test_a_run_is_simulated_with_the_passes_and_kernels_that_it_had():
    assert not has_present_kernels({"machine": {"kernels": "before"}})
    assert has_present_kernels({})
    assert rows_of_passes({"machine": {"pass_rows": [1, 2, 4]}}) == [1, 2, 4]
    assert rows_of_passes({}) == BUCKETS


def test_layouts_are_compared_on_as_many_gpus_only(tmp_path):
    """A folder may hold runs of two and of four GPUs."""
    models = ("qwen3-30b-a3b",)
    machine = {"start": "a", "hardware": {"gpus": ["x"] * 4}}
    for layout in ("crosspool-1+1", "static-2", "crosspool-1+3", "static-4", "elastic-4"):
        run = {**run_of(models, 2), "machine": machine}
        run["models"] = {**run["models"], models[0]: json.loads(json.dumps(run["models"][models[0]]))}
        run["models"][models[0]]["tbt_ms"]["p99"]["value"] = {"static-2": 40.0, "elastic-4": 160.0}.get(layout, 20.0)
        (tmp_path / f"load_{layout}_0.8.json").write_text(json.dumps(run))
    report = layouts_report(Runs(tmp_path), models, {"kv_pool_bytes": "48GiB"})
    assert report.hardware == "h200-x4"
    metrics = report.metrics
    assert metrics["static_over_crosspool.qwen3-30b-a3b.0.8"] == 2.0
    assert metrics["static_over_crosspool-1+3.qwen3-30b-a3b.0.8"] == 1.0
    assert metrics["elastic_over_crosspool-1+3.qwen3-30b-a3b.0.8"] == 8.0
    assert report.limits["elastic_over_crosspool-1+3.qwen3-30b-a3b.0.8"] == 8.0
    assert "elastic_over_crosspool.qwen3-30b-a3b.0.8" not in metrics, "it ran on twice as many GPUs"
    assert "sim_error_percent.static-4.qwen3-30b-a3b.0.8.p99" in metrics
    assert "k_pool_within.crosspool-1+3.0.8" in metrics
    assert "computed from the models' shapes" in report.notes["one_request_tokens.qwen3-30b-a3b.elastic-4"]


def test_a_layout_is_simulated_with_the_lanes_that_its_server_has():
    layouts = ("crosspool-1+1", "crosspool-1+2", "crosspool-1+3", "crosspool-1+3.2lanes", "crosspool-1+1s.3lanes")
    assert [decode_lanes(layout, ["qwen3-30b-a3b"]) for layout in layouts] == [2, 2, 3, 2, 3]


def test_lanes_reach_the_simulator(monkeypatch):
    run, seen = run_of(("qwen3-30b-a3b",)), []
    monkeypatch.setattr(predicted, "simulate", lambda plan, plan_input, settings, measured: [seen.append(plan_input)])
    simulated(run, {"count": 4, "kv": 1}, "crosspool", {}, decode_lanes=3)
    assert {plan_input.engine.decode_lanes for plan_input in seen} == {3}
