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


def test_prefill_gpus_are_told_not_to_be_simulated(tmp_path):
    line = "- g0: prompts are simulated in the pools, not on p0"
    assert line in run(tmp_path, text=GOOD.replace("count: 2", "count: 3, prefill: 1")).output
    assert "prompts are simulated" not in run(tmp_path).output


def test_a_model_without_requests_has_no_times(tmp_path):
    silent = GOOD.replace("deepseek-v2-lite, rate: 2", "deepseek-v2-lite, rate: 0.000001")
    shown = {line.split()[0]: line.split()[1:] for line in run(tmp_path, text=silent).output.splitlines() if line}
    assert shown["deepseek-v2-lite"] == ["0", "0", "0", "-", "-", "-", "-", "-"]
    assert "-" not in shown["glm-4.7-flash"]


def test_a_time_without_requests_is_told_with_a_remedy(tmp_path):
    told = "- no request arrived in that time; give more --seconds, or a later --start"
    assert told in run(tmp_path, text=GOOD.replace("rate: 2", "rate: 0.000001")).output
    assert told not in run(tmp_path).output


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


@pytest.mark.parametrize("option", ["--output", "--chrome"])
def test_a_file_that_cannot_be_written_takes_no_result_away(tmp_path, option):
    path = str(tmp_path / "nowhere" / "file.json")
    result = run(tmp_path, "--mode", "exact", "--seconds", "1", option, path)
    assert "g0 (crosspool)" in result.output
    assert str(result.exception) == f"cannot write {path}: No such file or directory"


def test_a_chrome_trace_shows_every_segment(tmp_path):
    path = tmp_path / "trace.json"
    result = run(tmp_path, "--mode", "exact", "--chrome", str(path), "--seconds", "1", "--json")
    assert json.loads(result.stdout)["groups"], "a line that is no JSON"
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"kv", "weights"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) > 1000
    assert all(span["dur"] > 0 and span["ts"] >= 0 for span in spans)


def planned(tmp_path, text=GOOD):
    (tmp_path / "planned.yaml").write_text(text)
    path = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "planned.yaml"), "--output", str(path)])
    assert result.exit_code == 0, result.output
    return path


SEVERAL = """
gpus: {kind: h200, count: 6, per_group: 3, kv: 2}
service: {cost: steady, tbt_ms: 20}
precision: 0.2
admission: reserve
engine: {max_num_seqs: 3, max_num_batched_tokens: 64, decode_lanes: 1, prefill_lanes: 2}
models:
  - {model: glm-4.7-flash, rate: 2, lengths: {prompt: 300, output: 50}, page_tokens: 64}
  - {model: qwen3-30b-a3b, rate: 2, lengths: {prompt: 300, output: 50}}
  - {model: mixtral-8x7b, rate: 2, lengths: {prompt: 300, output: 50}}
"""


BY_SIMULATOR = """
gpus: {kind: h200, count: 3}
service: {cost: simulator, measured: [slow.json]}
precision: 0.2
models:
  - {model: deepseek-v2-lite, rate: 2, lengths: {prompt: 300, output: 50}}
"""


def test_measured_stage_times_make_the_plan_and_its_simulation(tmp_path):
    def table(microseconds):
        entry = {"models": {"deepseek-v2-lite": {"ffn_us": {"1": {"1": microseconds, "64": microseconds}}}}}
        (tmp_path / "slow.json").write_text(json.dumps(entry))

    tbt_s = []
    for microseconds in (100, 400):
        table(microseconds)
        plan = planned(tmp_path, BY_SIMULATOR)
        tbt_s.append(json.loads(plan.read_text())["groups"][0]["models"][0]["tbt_s"])
        at_once = run(tmp_path, "--json", text=BY_SIMULATOR)
        assert at_once.exit_code == 0, at_once.output
        assert at_once.stdout == run(tmp_path, "--json", "--plan", str(plan), text=BY_SIMULATOR).stdout
    assert tbt_s[1] - tbt_s[0] > 20 * 300e-6  # 26 MoE layers, each 300 us longer


def test_measured_stage_times_are_for_the_simulator(tmp_path):
    result = run(tmp_path, text=BY_SIMULATOR.replace("cost: simulator", "cost: roofline"))
    assert "measured stage times are for cost simulator, not roofline" in str(result.exception)


@pytest.mark.parametrize("text", [GOOD, SEVERAL])
@pytest.mark.parametrize("mode", ["steps", "exact"])
def test_a_saved_plan_behaves_as_planning_and_simulating_in_one_go(tmp_path, text, mode):
    plan = planned(tmp_path, text)
    at_once = run(tmp_path, "--mode", mode, "--json", text=text)
    apart = run(tmp_path, "--mode", mode, "--json", "--plan", str(plan), text=text)
    assert at_once.exit_code == apart.exit_code == 0, (at_once.output, apart.output)
    assert json.loads(apart.stdout) == json.loads(at_once.stdout)


def test_what_the_plan_decided_is_simulated_not_what_the_file_says(tmp_path):
    plan = planned(tmp_path, SEVERAL)
    other = SEVERAL.replace("max_num_seqs: 3", "max_num_seqs: 32").replace("page_tokens: 64", "page_tokens: 16")
    other = other.replace("admission: reserve", "admission: forecast").replace("decode_lanes: 1", "decode_lanes: 2")
    wanted = json.loads(run(tmp_path, "--json", text=SEVERAL).stdout)
    assert json.loads(run(tmp_path, "--json", text=other).stdout) != wanted
    assert json.loads(run(tmp_path, "--json", "--plan", str(plan), text=other).stdout) == wanted


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: h200", "kind: h100-80gb", "the plan is for GPUs h200 with 140.4 GiB, the input has h100-80gb"),
        ("count: 6, per_group: 3", "count: 3", "the plan has 2 groups, the input 1"),
        ("count: 6, per_group: 3", "count: 12, per_group: 6", "g0 of the plan has 3 GPUs, a group of the input 6"),
        ("kv: 2", "kv: 1", "g0 of the plan has 2 KV GPUs, the input asks for 1"),
        ("kv: 2", "kv: 2, used: 1GB", "leaves 0 B of each GPU to others, the input 953.7 MiB"),
        ("model: mixtral-8x7b", "model: olmoe-1b-7b", "olmoe-1b-7b is in the input and not in the plan"),
        ("  - {model: mixtral-8x7b, rate: 2, lengths: {prompt: 300, output: 50}}", "", "mixtral-8x7b is in the plan"),
        ("model: mixtral-8x7b", "model: olmoe-1b-7b, name: mixtral-8x7b", "bytes beside the FFNs in the plan and"),
    ],
)
def test_a_plan_for_something_else_is_refused(tmp_path, old, new, message):
    plan = planned(tmp_path, SEVERAL)
    assert old in SEVERAL
    result = run(tmp_path, "--plan", str(plan), text=SEVERAL.replace(old, new))
    assert isinstance(result.exception, CrossPoolError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "fast"], "mode 'fast' is unknown"),
        (["--layout", "static", "--mode", "exact"], "simulate it with mode steps"),
        (["--pass-rows", "1,two"], "pass_rows are '1,two'; give numbers with commas between"),
        (["--order", "fifo"], "order 'fifo' is unknown"),
        (["--chrome", "trace.json"], "use mode exact"),
        (["--plan", "missing.json"], "cannot read missing.json"),
        (["--measured", "missing.json"], "missing.json is no table of measured stage times"),
    ],
)
def test_mistakes_are_one_line_errors(tmp_path, arguments, message):
    result = run(tmp_path, *arguments)
    assert isinstance(result.exception, CrossPoolError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
