"""`benchmarks/report.py`: the files of a kept result hold every figure and how to get it again."""

import datetime
import json
import math

import numpy as np
import pytest

from benchmarks.report import Report, describe_commit, describe_hardware, with_pictures

DATE = datetime.date(2026, 12, 1)


@pytest.fixture
def report():
    return Report("decode", hardware="cpu", config={"batch": 1, "layout": "processes"}, seed=7, date=DATE)


def test_files_are_named_after_what_hardware_and_date(report, tmp_path):
    report.metric("tokens_per_s", 12.5)
    json_path, markdown_path = report.write(tmp_path / "results")
    assert json_path.name == "decode_cpu_2026-12-01.json"
    assert markdown_path.name == "decode_cpu_2026-12-01.md"


def test_json_holds_flat_metrics_and_everything_needed_to_run_again(report, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["/opt/bin/python", "-m", "benchmarks.bench_decode", "--batch", "1"])
    report.metric("decode_ratio_vs_transformers.b1", np.float32(4.5))
    report.metric("bandwidth_gb_per_s", 9.0, limit=20.0, note="one core's copy bandwidth")
    written = json.loads(report.write(tmp_path)[0].read_text())
    assert written["metrics"] == {"decode_ratio_vs_transformers.b1": 4.5, "bandwidth_gb_per_s": 9.0}
    assert written["limits"] == {"bandwidth_gb_per_s": 20.0}
    assert written["config"] == {"batch": 1, "layout": "processes"}
    assert (written["what"], written["seed"], written["date"]) == ("decode", 7, "2026-12-01")
    assert written["hardware"]["name"] == "cpu"
    assert written["hardware"]["num_cores"] >= 1
    assert "numpy" in written["versions"]
    assert written["commit"]
    assert written["command"] == "python -m benchmarks.bench_decode --batch 1"


def test_samples_become_percentiles_with_the_limit_at_the_median(report):
    report.samples("tbt_ms", list(range(101)), limit=40.0, note="bytes / bandwidth")
    assert report.metrics == {"tbt_ms.p50": 50.0, "tbt_ms.p95": 95.0, "tbt_ms.p99": 99.0, "tbt_ms.num_samples": 101}
    assert report.limits == {"tbt_ms.p50": 40.0}


def test_markdown_lists_each_metric_with_its_limit_and_note(report):
    report.metric("hop_us", 2.75, limit=2.06, note="flag alone | no payload")
    report.metric("num_tokens", 12345)
    text = report.as_markdown()
    assert text.startswith("# decode, cpu, 2026-12-01\n")
    assert "| hop_us | 2.75 | 2.06 | flag alone \\| no payload |" in text
    assert "| num_tokens | 12,345 |  |  |" in text
    assert "seed 7" in text


def test_command_names_no_directory_of_this_machine(report, monkeypatch):
    monkeypatch.setattr(
        "sys.orig_argv", ["/somewhere/venv/bin/python", "-m", "benchmarks.bench_decode", "--out", "/tmp/x"]
    )
    assert report.as_dict()["command"] == "python -m benchmarks.bench_decode --out x"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_cannot_be_compared_are_refused(report, value):
    with pytest.raises(ValueError, match="compared later"):
        report.metric("ratio", value)


def test_a_metric_is_reported_once(report):
    report.metric("ratio", 1.0)
    with pytest.raises(ValueError, match="reported twice"):
        report.metric("ratio", 2.0)


def test_no_samples_is_an_error_not_an_empty_row(report):
    with pytest.raises(ValueError, match="no samples"):
        report.samples("tbt_ms", [])


@pytest.mark.parametrize("name", ["Decode", "a/b", "", "two words"])
def test_names_that_do_not_fit_a_file_name_are_refused(name):
    with pytest.raises(ValueError, match="file name"):
        Report(name, hardware="cpu")


def test_commit_is_unknown_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.report.ROOT", tmp_path)
    assert describe_commit() == "unknown"


def test_a_copy_without_a_checkout_says_its_commit_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.report.ROOT", tmp_path)
    (tmp_path / "COMMIT").write_text("0123abc\n")
    assert describe_commit() == "0123abc"


def test_hardware_is_described_without_importing_torch(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    assert "gpus" not in describe_hardware()


def test_pictures_that_lie_beside_a_result_are_shown_once(report, tmp_path):
    report.summary = "![gaps](decode_cpu_2026-12-01_gaps.svg)"
    for name in ("decode_cpu_2026-12-01_gaps", "decode_cpu_2026-12-01_fused", "decode_cpu_2026-11-30_fused"):
        (tmp_path / f"{name}.svg").write_text("<svg/>")
    text = report.write(tmp_path)[1].read_text()
    shown = [line for line in text.splitlines() if line.startswith("![")]
    assert shown == [
        "![gaps](decode_cpu_2026-12-01_gaps.svg)",
        "![decode_cpu_2026-12-01_fused](decode_cpu_2026-12-01_fused.svg)",
    ]
    assert with_pictures(text, sorted(tmp_path.glob("decode_cpu_2026-12-01_*.svg"))) == text
