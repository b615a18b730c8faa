"""What a change would gain, simulated: every change does what its words say, on the stage times."""

from __future__ import annotations

import json

import pytest

from benchmarks.layouts import predicted
from benchmarks.layouts.changes import (
    BASELINES,
    CHANGES,
    LAYOUTS,
    MODELS,
    UNMEASURED,
    Change,
    add_change,
    as_list,
    changes_of,
    ffn_times,
    gpus_of,
    simulate_change,
    summary,
    with_means,
)
from benchmarks.layouts.predicted import stage_times
from benchmarks.report import Report
from crosspool.simulator.measured import MeasuredModel

MODEL = MeasuredModel(
    ffn_s={1: ((1, 30e-6), (8, 170e-6), (24, 300e-6), (32, 350e-6))},
    attention_base_s=20e-6,
    lanes_efficiency=((8, 0.9),),
    beside_prompt_s=3e-3,
)


def ffn_us(model):
    return [pytest.approx(1e6 * value) for _, value in model.ffn_s[1]]


def test_changes_reach_the_stages_that_they_name():
    assert ffn_us(CHANGES["ffn95"].stages(MODEL)) == [30, 0.95 * 170, 0.95 * 300, 350]
    routed = CHANGES["routekv"].stages(MODEL)
    assert (ffn_us(routed), routed.attention_base_s) == ([25, 165, 295, 345], pytest.approx(25e-6))
    assert ffn_us(CHANGES["both"].stages(MODEL))[1] == pytest.approx(0.95 * 170 - 5)
    assert CHANGES["prompts_free"].stages(MODEL).beside_prompt_s == 0.0
    assert CHANGES["none"].stages(MODEL) is MODEL
    assert ffn_us(CHANGES["halves"].stages(MODEL)) == [60, 180, 405, 470]
    assert ffn_times(MODEL, 0.5).ffn_s[1][0][1] == pytest.approx(15e-6)


def test_every_model_has_a_cost_of_prompts_to_be_changed():
    assert all(model.beside_prompt_s for model in with_means(stage_times()).values())


def test_a_faster_ffn_gains_and_the_list_has_a_line_of_it(tmp_path):
    rows = [{"t": 0.4 * number, "model": name, "in": 300, "out": 60} for number in range(5) for name in MODELS]
    trace = tmp_path / "sharegpt_0.8.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    report, stages = Report("layout_changes", hardware="cpu"), stage_times(is_present=True)
    fast = Change(words="", stages=lambda model: ffn_times(model, 0.7))
    for layout in LAYOUTS:
        slow, quick = (simulate_change(trace, 1.0, layout, change, stages) for change in (CHANGES["none"], fast))
        assert slow[0].total.num_finished == 9, "the first second's"
        for name in CHANGES:
            add_change(report, layout, name, "0.8", quick if name == "ffn95" else slow)
        p50 = [report.metrics[f"simulated_tbt_ms.{layout}.{name}.{MODELS[0]}.0.8.p50"] for name in ("none", "ffn95")]
        assert p50[1] < 0.95 * p50[0]
    for layout in BASELINES:
        add_change(report, layout, "none", "0.8", simulate_change(trace, 1.0, layout, CHANGES["none"], stages))
    listed = as_list(report, "0.8").splitlines()
    of_pools = changes_of("crosspool-1+1", "0.8")
    assert "64seqs" in changes_of("crosspool-1+1", "2.0").keys() - of_pools.keys()
    assert len(listed) == 2 * len(of_pools) + len(BASELINES)
    assert f"{MODELS[0]} {p50[0]:.1f} / " in listed[len(of_pools)]


@pytest.mark.parametrize(
    ("layout", "gpus"),
    [
        ("crosspool-1+1s", {"count": 2, "kv": 1}),
        ("crosspool-2+2", {"count": 4, "kv": 2}),
        ("crosspool-3+1", {"count": 4, "kv": 3}),
        ("elastic-4", {"count": 4, "kv": 1}),
    ],
)
def test_a_layouts_name_says_its_gpus(layout, gpus):
    assert gpus_of(layout) == gpus


def test_layouts_that_were_not_measured_stand_beside_what_is_asked_of_them(tmp_path):
    rows = [{"t": 0.4 * number, "model": name, "in": 300, "out": 60} for number in range(5) for name in MODELS]
    trace = tmp_path / "sharegpt_0.8.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    report, stages, p50 = Report("layouts_simulated", hardware="cpu"), stage_times(is_present=True), {}
    for layout in UNMEASURED:
        groups = simulate_change(trace, 1.0, layout, CHANGES["none"], stages, 1)
        add_change(report, layout, "none", "0.8", groups)
        p50[layout] = report.metrics[f"simulated_tbt_ms.{layout}.none.{MODELS[0]}.0.8.p50"]
    assert p50["crosspool-1+3"] < p50["crosspool-1+2"] < p50["crosspool-3+1"]
    limits = {name: limit for name, limit in report.limits.items() if "tbt" in name}
    assert limits == {
        f"simulated_tbt_ms.crosspool-1+3.none.{model}.0.8.{level}": bound
        for model in MODELS
        for level, bound in (("p50", 6.0), ("p99", 12.0))
    }
    said = summary(report, ["0.8"], UNMEASURED, 1.0, 1)
    assert said.startswith("SIMULATED, nothing here was measured")
    assert said.count("\n- ") == len(UNMEASURED)


def test_orders_and_patience_reach_the_simulator(monkeypatch, tmp_path):
    trace, given = tmp_path / "sharegpt_0.8.jsonl", []
    trace.write_text(json.dumps({"t": 0.0, "model": MODELS[0], "in": 30, "out": 3}))
    monkeypatch.setattr(predicted, "simulate", lambda plan, plan_input, settings, measured: [given.append(settings)])
    for name in ("none", "ticket", "patience"):
        simulate_change(trace, 1.0, "crosspool-1+3", CHANGES[name], stage_times(), 1)
    usual, ticket, patience = given
    assert (usual.order, ticket.order) == ("priority", "ticket")
    assert patience.patience_s == pytest.approx(usual.patience_s / 3)
    assert patience.patience_token_s == pytest.approx(usual.patience_token_s / 3)
