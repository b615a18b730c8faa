"""`crosspool simulate` from a file to its report, and its mistakes in one line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from crosspool.cli import app
from crosspool.errors import CrossPoolError

GOOD = """
gpus: {kind: h200, count: 2}
service: {cost: steady, tbt_ms: 20}
precision: 0.2
models:
  - {model: glm-4.7-flash, rate: 2, lengths: {prompt: 300, output: 50}}
  - {model: deepseek-v2-lite, rate: 2, lengths: {prompt: 300, output: 50}}
"""


def run(tmp_path, *arguments, text=GOOD):
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    return CliRunner().invoke(app, ["simulate", str(path), "--seconds", "2", *arguments])


def test_the_report_is_shown(tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    for word in ("g0 (crosspool)", "glm-4.7-flash", "TBT P99", "- kv: idle for", "- KV of kv: mean"):
        assert word in result.output


def test_the_report_is_written_and_both_modes_agree(tmp_path):
    reports = {}
    for mode in ("steps", "exact"):
        result = run(tmp_path, "--mode", mode, "--json", "--output", str(tmp_path / "report.json"))
        assert result.exit_code == 0, result.output
        reports[mode] = json.loads(result.stdout)["groups"][0]
        assert json.loads((tmp_path / "report.json").read_text())["groups"][0] == reports[mode]
    means = {mode: report["total"]["tbt_s"]["mean"] for mode, report in reports.items()}
    assert means["steps"] == pytest.approx(means["exact"], rel=0.02)
    assert reports["steps"]["total"]["num_tokens"] == reports["exact"]["total"]["num_tokens"] > 0


def test_a_chrome_trace_shows_every_segment(tmp_path):
    path = tmp_path / "trace.json"
    result = run(tmp_path, "--mode", "exact", "--chrome", str(path), "--seconds", "1")
    assert result.exit_code == 0, result.output
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"kv", "weights"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) > 1000
    assert all(span["dur"] > 0 and span["ts"] >= 0 for span in spans)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "fast"], "mode 'fast' is unknown"),
        (["--layout", "static", "--mode", "exact"], "simulate it with mode steps"),
        (["--order", "fifo"], "order 'fifo' is unknown"),
        (["--chrome", "trace.json"], "use mode exact"),
        (["--measured", "missing.json"], "missing.json is no table of measured stage times"),
    ],
)
def test_mistakes_are_one_line_errors(tmp_path, arguments, message):
    result = run(tmp_path, *arguments)
    assert isinstance(result.exception, CrossPoolError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
