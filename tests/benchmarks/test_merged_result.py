"""Parts of one benchmark that were measured in turns become one result."""

from __future__ import annotations

import datetime

import pytest

from benchmarks.merged_result import merged
from benchmarks.report import Report


def result(commit, metrics, what="decode_step", hardware="h200-x2"):
    origin = {"hardware": {"name": hardware, "gpus": ["NVIDIA H200"]}, "commit": commit, "versions": {"torch": "2"}}
    origin["command"] = f"python -m {commit}"
    report = Report(what, hardware=hardware, seed=7, date=datetime.date(2026, 1, 2), origin=origin, summary=commit)
    for name, value in metrics.items():
        report.metric(name, value, limit=1.0, note=commit)
    return report.as_dict()


def test_later_runs_add_and_replace():
    both = merged([result("aaa", {"x": 1.0, "y": 2.0}), result("bbb", {"y": 3.0, "z": 4.0})]).as_dict()
    assert both["metrics"] == {"x": 1.0, "y": 3.0, "z": 4.0}
    assert both["notes"] == {"x": "aaa", "y": "bbb", "z": "bbb"}
    assert both["commit"] == "bbb"
    assert both["command"] == "python -m bbb"
    assert [part["commit"] for part in both["config"]["parts"]] == ["aaa", "bbb"]
    assert both["hardware"]["gpus"] == ["NVIDIA H200"]
    assert both["summary"] == "bbb"


@pytest.mark.parametrize("other", [{"what": "hop"}, {"hardware": "h200"}])
def test_results_of_something_else_are_refused(other):
    with pytest.raises(ValueError, match="only parts of one result are merged"):
        merged([result("aaa", {"x": 1.0}), result("bbb", {"x": 1.0}, **other)])
