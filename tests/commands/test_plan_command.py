"""`crosspool plan` from a file to its output, and its mistakes in one line."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from crosspool.cli import app
from crosspool.errors import CrossPoolError
from crosspool.planner.plan import read_plan

GOOD = """
gpus: {kind: h200, count: 2}
service: {cost: steady, tbt_ms: 20}
precision: 0.1
models:
  - {model: glm-4.7-flash, rate: 0.2, lengths: {prompt: 900, output: 300}, context: 100000}
  - deepseek-v2-lite
"""


def run(tmp_path, text, *arguments):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return CliRunner().invoke(app, ["plan", str(path), *arguments])


def test_the_plan_is_shown_and_written(tmp_path):
    result = run(tmp_path, GOOD, "--output", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    assert "g0: 1 KV + 1 weights x h200" in result.output
    assert "deepseek-v2-lite" in result.output
    plan = read_plan(tmp_path / "plan.json")
    assert plan.groups[0].model("glm-4.7-flash").guaranteed_context_tokens == 100000
    as_json = run(tmp_path, GOOD, "--json")
    assert json.loads(as_json.output) == json.loads(plan.to_json())


def test_explanations_are_printed(tmp_path):
    result = run(tmp_path, GOOD, "--explain")
    assert result.exit_code == 0
    assert "**Budget**" in result.output


def test_pictures_that_cannot_be_made_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(tmp_path, GOOD, "--output", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "pictures"))
    assert "pip install 'crosspool[plots]'" in str(result.exception)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("h200", "h300"), "GPU kind 'h300' is unknown"),
        (GOOD.replace("count: 2", "count: 2, memory: 40GB"), "smallest set"),
        (GOOD.replace("deepseek-v2-lite", "deepseek-v9"), "'deepseek-v9' is no model directory"),
    ],
)
def test_mistakes_are_one_line_errors(tmp_path, text, message):
    result = run(tmp_path, text)
    assert isinstance(result.exception, CrossPoolError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
