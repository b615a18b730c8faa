"""`benchmarks/layouts/targets.py`, `picture.py`: what was asked for, who wins, and how it looks."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.layouts.figures import add_layout_ratios
from benchmarks.layouts.peers import add_peers
from benchmarks.layouts.picture import gap_lines, write_pictures
from benchmarks.layouts.targets import Target, mark_targets, targets, verdict
from benchmarks.report import Report

MODELS = ("glm-4.7-flash", "qwen3-30b-a3b")


def report_of(**metrics):
    report = Report("layouts", hardware="h200-x2")
    for name, value in metrics.items():
        report.metric(name, value)
    return report


def test_a_bound_holds_in_its_own_direction():
    most, least = Target("a", 42.0), Target("b", 8.0, is_floor=True)
    assert [most.is_met(value) for value in (41.9, 42.1)] == [True, False]
    assert [least.is_met(value) for value in (7.9, 8.1)] == [False, True]
    assert "missed by 50 %" in most.told(63.0)
    assert "missed by 50 %" in least.told(4.0)


def test_what_was_missed_met_lost_won_and_left_out_is_told():
    report = report_of(
        **{
            "tbt_ms.crosspool-1+1.glm-4.7-flash.0.8.p50": 26.0,
            "tbt_ms.crosspool-1+1.glm-4.7-flash.0.8.p99": 40.0,
            "tbt_ms.static-2.glm-4.7-flash.0.8.p99": 16.0,
            "tbt_ms.elastic-2.glm-4.7-flash.0.8.p99": 400.0,
            "tokens_per_s.crosspool-1+1.0.8": 1125.0,
            "tokens_per_s.static-2.0.8": 1310.0,
            "served.crosspool-1+1.0.8": 1.0,
            "served.static-2.0.8": 1.0,
            "served.elastic-2.0.8": 1.0,
        }
    )
    add_layout_ratios(report, MODELS, ("0.8", "2.0"), ("static-2", "elastic-2"), lambda *_: "of two starts")
    wanted = targets(MODELS, ("0.8", "2.0"))
    mark_targets(report, wanted)
    assert report.limits["tbt_ms.crosspool-1+1.glm-4.7-flash.0.8.p99"] == 42.0
    assert report.limits["tokens_over_static.crosspool-1+1.0.8"] == 0.9
    assert report.metrics["elastic_over_crosspool.glm-4.7-flash.0.8"] == 10.0
    assert report.notes["static_over_crosspool.glm-4.7-flash.0.8"].endswith("16 over 40; of two starts")
    parts = dict(part.split("\n", 1) for part in ("\n\n" + verdict(report, wanted)).split("\n\n**")[1:])
    assert "0.8.p50 is 26, at most 22: missed by 18 %" in parts["Missed**"]
    assert "tokens_over_static.crosspool-1+1.0.8 is 0.8588" in parts["Missed**"]
    assert "0.8.p99 is 40, at most 42" in parts["Met**"]
    assert "static_over_crosspool.glm" in parts["Losses**"]
    assert "elastic_over_crosspool.glm" in parts["Wins**"]
    assert "elastic_over_crosspool.glm" not in parts["Losses**"]
    assert "crosspool-1+3.qwen3-30b-a3b.2.0.p99" in parts["Not measured**"]


def test_peers_are_dated_and_only_beside_rates_that_we_ran():
    report = report_of()
    add_peers(report, MODELS, ("0.8",))
    assert report.metrics["tbt_ms.kvcached-2.qwen3-30b-a3b.0.8.p99"] == 632.0
    assert all(".0.8" in name and "2026-11-29" in report.notes[name] for name in report.metrics)


def test_first_tokens_that_come_later_are_a_loss():
    found = {f"{name}.{layout}{rest}": value for layout, value in (("crosspool-1+1", 300.0), ("static-2", 150.0))
             for name, rest, value in (("ttft_ms", ".all.0.8.p50", value), ("served", ".0.8", 1.0))}  # fmt: skip
    report = report_of(**found)
    add_layout_ratios(report, MODELS, ("0.8",), ("static-2",))
    assert report.metrics["ttft_over_static.crosspool-1+1.0.8"] == 2.0
    assert "**Losses**\n\n- ttft_over_static" in verdict(report, [])


def test_the_picture_has_a_panel_for_each_model_and_a_line_for_each_layout(tmp_path):
    def run(scale):
        gaps = [[scale * number / 1e3 for number in range(1, 101)]] * 2
        return {"request_models": list(MODELS), "itls": gaps}

    points = dict(gap_lines(run(1.0), MODELS[0]))
    assert min(points) > 1.0
    assert points[max(points)] == pytest.approx(100.0, rel=0.01), "one gap in a thousand is longer than that"
    loads = {"0.8": {"crosspool-1+1": run(1.0), "static-2": run(0.5)}, "2.0": {"static-2": {"request_models": []}}}
    (path,) = write_pictures(tmp_path, "layouts", loads, MODELS)
    picture = ElementTree.fromstring(path.read_text())
    panels = [child for child in picture if child.tag.endswith("svg")]
    assert [len(panel.findall("{*}polyline")) for panel in panels] == [2, 2]
    assert panels[0].attrib["y"] != panels[1].attrib["y"]
