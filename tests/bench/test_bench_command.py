"""`crosspool bench` as a user runs it: against the real HTTP server over a scripted engine."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.served.stub_engine import FAST, StubEngine
from crosspool import cli
from crosspool.bench.compare import differences
from crosspool.bench.record import RequestRecord
from crosspool.bench.report import _tail
from crosspool.bench.result import _failures
from crosspool.bench.saved import read_result
from crosspool.bench.table import show_result
from crosspool.commands.bench import each_with_flag
from crosspool.config import ServerConfig
from crosspool.demo.scenario import demo_model_dirs
from crosspool.errors import CrossPoolError
from crosspool.server.app import create_app
from crosspool.server.catalogue import Catalogue, ModelFrontend
from crosspool.server.tokenizer import TextTokenizer
from crosspool.workload.traces import read_trace
from tests.support.live_server import live_server

VLLM_KEYS = (  # noqa: SIM905
    "date backend model_id num_prompts request_rate burstiness max_concurrency duration completed total_input_tokens "
    "total_output_tokens request_throughput request_goodput output_throughput total_token_throughput input_lens "
    "output_lens ttfts itls generated_texts errors mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms "
    "median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms p99_e2el_ms"
).split()
PACE_S = 0.01


@pytest.fixture(scope="module")
def url():
    tokenizer = TextTokenizer.from_directory(demo_model_dirs()["austen"])
    frontends = [ModelFrontend(name=name, vocab_size=4096, tokenizer=tokenizer) for name in (FAST, "paced")]
    with live_server(create_app(StubEngine(PACE_S), Catalogue(frontends), ServerConfig())) as address:
        yield address


def bench(url, *arguments):
    return CliRunner().invoke(cli.app, ["bench", "--base-url", url, *arguments])


@pytest.fixture(scope="module")
def result_file(url, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    shown = bench(
        url, "--request-rate", "40", "--request-rate", "paced=6", "--num-prompts", "12", "--output-len", "20",
        "--save-detailed", "--report", "--result-dir", str(folder), "--result-filename", "run.json", "--goodput",
        "ttft:5000", "tbt:5000", "--label", "first",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    return folder / "run.json"


def test_every_request_is_served_and_measured(result_file):
    result = read_result(result_file)
    assert (result["completed"], result["refused"], result["failed"]) == (24, 0, 0)
    assert result["total_output_tokens"] == 24 * 20
    paced = result["models"]["paced"]
    gaps = [gap for gaps, model in zip(result["itls"], result["request_models"], strict=True) if model == "paced"
            for gap in gaps]  # fmt: skip
    assert paced["tbt_ms"]["mean"] == pytest.approx(1e3 * sum(gaps) / len(gaps))
    assert paced["tbt_ms"]["mean"] > 0.8 * 1e3 * PACE_S  # never faster than the engine, but for a slow first read
    assert paced["tbt_ms"]["num"] == 12 * 19
    interval = paced["tbt_ms"]["p99"]
    assert interval["low"] <= interval["value"] <= interval["high"]
    assert result["models"][FAST]["tbt_ms"]["mean"] < paced["tbt_ms"]["mean"]
    assert (result["goodput_share"], result["goodput_limits"]) == (1.0, "ttft:5000 tbt:5000")
    assert result["models"]["paced"]["server_queue"]["num"] == 12  # the warm-up is not counted
    assert result["client"]["loop_lag_p99_ms"] >= 0
    assert sum(result["timeline"]["output_tokens_per_s"]) == 480
    assert result["max_concurrent_requests"] == max(result["timeline"]["running_requests"]) > 1


def test_files_have_the_keys_that_tools_know(result_file):
    result = read_result(result_file)
    assert [key for key in VLLM_KEYS if key not in result] == []
    assert len(result["itls"]) == len(result["input_lens"]) == 24


def test_a_result_is_a_trace_again(url, result_file):
    trace = read_trace(result_file)
    assert set(trace.models) == {FAST, "paced"}
    assert trace.has_service_times
    shown = bench(url, "--trace", str(result_file), "--trace-speed", "4", "--num-warmups", "0", "--json")
    again = json.loads(shown.stdout)
    assert again["completed"] == 24
    assert again["request_rate"] == "trace"


def test_reports_hold_every_model_and_picture(result_file):
    page = result_file.with_suffix(".html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 4
    assert page.count("<polyline") == 8, "each picture has both models"
    assert page.count("<table") == 2
    assert "TBT by model" in page
    markdown = result_file.with_suffix(".md").read_text()
    assert "| paced | TTFT |" in markdown
    assert "| model | sent/s | served | refused | failed | tokens/s | good % | queued ms ~p50 | ~p99 |" in markdown
    assert "| paced | " in markdown.partition("| model | ms |")[0]
    for line in markdown.splitlines():
        if line.startswith("!["):
            assert (result_file.parent / line.partition("(")[2].rstrip(")")).exists()


@pytest.mark.parametrize("width", [60, 100, 200])
def test_figures_are_whole_in_any_terminal(result_file, width):
    console = Console(width=width, record=True, file=io.StringIO())
    show_result(read_result(result_file), console)
    text = console.export_text()
    assert "24 of 24 requests served" in text
    assert "…" not in text


def test_the_pictures_tell_what_share_is_longer_as_far_as_there_are_samples(result_file):
    result = read_result(result_file)
    assert _tail(result["models"]["paced"], "tbt_ms")[0][1] == 100.0
    for metric in ("tbt_ms", "ttft_ms"):
        times, shares = zip(*_tail(result["models"]["paced"], metric), strict=True)
        assert list(times) == sorted(times)
        assert list(shares) == sorted(shares, reverse=True)
        assert shares[-1] >= 100 / result["models"]["paced"][metric]["num"]


def test_one_model_is_not_told_twice(result_file):
    result = read_result(result_file)
    del result["models"]["paced"]
    console = Console(width=100, record=True, file=io.StringIO())
    show_result(result, console)
    assert not [line for line in console.export_text().splitlines() if line.startswith("all ")]
    assert {item.model for item in differences(result, result)} == {FAST}


def test_several_processes_and_a_bound_on_concurrency(url):
    shown = bench(
        url, "--model", "paced", "--num-prompts", "9", "--output-len", "3", "--max-concurrency", "2",
        "--client-processes", "2", "--num-warmups", "0", "--json",
    )  # fmt: skip
    result = json.loads(shown.stdout)
    assert result["completed"] == 9
    assert result["client"]["num_processes"] == 2
    assert result["max_concurrent_requests"] <= 2
    assert result["models"]["paced"]["client_queue_ms"]["max"] > 0


def test_requests_that_a_bound_held_back_were_not_sent_at_the_rate_asked_for(url):
    words = ("--model", "paced", "--request-rate", "400", "--num-prompts", "8", "--output-len", "10", "--num-warmups")
    free, held = (
        json.loads(bench(url, *words, "0", *more, "--json").stdout) for more in ((), ("--max-concurrency", "1"))
    )
    assert held["completed"] == 8
    assert held["realised_rates"]["paced"] < 1.5 / (9 * PACE_S) < free["realised_rates"]["paced"]


def test_a_run_in_which_nothing_is_served_says_why(url, tmp_path):
    shown = bench(url, "--model", "nobody", "--num-prompts", "3", "--num-warmups", "0", "--report",
                  "--result-dir", str(tmp_path))  # fmt: skip
    assert shown.exit_code == 0, shown.exception
    assert "0 of 3 requests served" in shown.stdout
    assert "3 not served: HTTP 404" in shown.stdout
    (page,) = tmp_path.glob("*.html")
    assert "3 failed" in page.read_text()


def test_failures_that_differ_in_numbers_alone_are_one():
    texts = [f"HTTP 400: {tokens} are too many" for tokens in (1030, 2049, 1100)] + ["HTTP 503: 7 are too many"]
    records = [RequestRecord(index=0, model="a", prompt_tokens=1, due_s=0.0, error=text) for text in texts]
    assert _failures(records) == {"HTTP 400: 1030 are too many": 3, "HTTP 503: 7 are too many": 1}


def test_any_label_makes_a_plain_file_name(url, tmp_path):
    shown = bench(url, "--model", "paced", "--num-prompts", "1", "--output-len", "2", "--num-warmups", "0", "--report",
                  "--label", "too long, a/b <c>", "--result-dir", str(tmp_path))  # fmt: skip
    assert shown.exit_code == 0, shown.exception
    (path,) = tmp_path.glob("*.md")
    assert re.fullmatch(r"bench-too-long-a-b-c-\d{8}-\d{6}\.md", path.name)
    assert read_result(path.with_suffix(".json"))["label"] == "too long, a/b <c>"
    assert {picture.stem.rpartition("-")[2] for picture in tmp_path.glob("*.svg")} == {"ttft", "tbt"}, "over too soon"


def test_a_trace_is_replayed_from_within_and_only_for_models_that_are_served(url, tmp_path):
    path = tmp_path / "trace.csv"
    rows = ["0,paced,5,2", "10,other,5,2", "10.1,paced,5,3", "10.2,far,5,2", "10.3,fast,5,2"]
    path.write_text("\n".join(["arrival_s,model,in,out", *rows]))
    words = ("--trace", str(path), "--num-warmups", "0", "--json")
    shown = bench(url, *words)
    assert "requests of 'other' and 1 more models, not served here" in str(shown.exception)
    result = json.loads(bench(url, *words, "--trace-skip-unserved", "--trace-start", "10").stdout)
    assert {name: figures["total_output_tokens"] for name, figures in result["models"].items()} == {
        "all": 5, "paced": 3, "fast": 2
    }  # fmt: skip
    assert result["duration"] < 5
    shown = bench(url, *words, "--trace-start", "11")
    assert "trace-start is 11, but the trace lasts 10.3 s" in str(shown.exception)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is not here")
def test_a_full_disk_takes_no_result_away(url, tmp_path):
    (tmp_path / "run.json").symlink_to("/dev/full")
    shown = bench(
        url, "--model", FAST, "--num-prompts", "2", "--output-len", "2", "--save-result", "--result-dir", str(tmp_path),
        "--result-filename", "run.json", "--json",
    )  # fmt: skip
    assert "run.json: No space left on device" in str(shown.exception)
    assert json.loads(shown.stdout)["completed"] == 2


def test_a_ramp_sends_ever_more(url):
    shown = bench(
        url, "--model", FAST, "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "99",
        "--duration", "1", "--output-len", "2", "--save-detailed", "--result-dir", "/dev/null/no", "--json",
    )  # fmt: skip
    assert "cannot write /dev/null/no" in str(shown.exception)
    shown = bench(
        url, "--model", FAST, "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "99",
        "--duration", "1", "--output-len", "2", "--json",
    )  # fmt: skip
    result = json.loads(shown.stdout)
    assert result["request_rate"] == "linear ramp"
    assert 25 < result["completed"] < 80


def test_results_are_compared_by_their_intervals(result_file, tmp_path):
    first = read_result(result_file)
    first["models"]["paced"]["tbt_ms"]["p50"] = {"value": 10.0, "low": 9.0, "high": 11.0}
    second = json.loads(json.dumps(first))
    second["models"]["paced"]["tbt_ms"]["p50"] = {"value": 100.0, "low": 12.0, "high": 120.0}
    second["models"]["paced"]["ttft_ms"]["p50"]["value"] *= 0.999  # within its interval
    verdicts = {(item.model, item.metric): item.verdict for item in differences(first, second)}
    assert verdicts["paced", "tbt_ms.p50"] == "worse"
    assert verdicts["paced", "ttft_ms.p50"] == "same"
    second["models"]["paced"]["completed"] = 3
    assert {item.verdict for item in differences(first, second) if item.model == "paced"} == {""}
    second["models"]["paced"]["completed"] = 12
    assert {item.verdict for item in differences(second, first) if item.metric == "tbt_ms.p50"} >= {"better"}
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, result in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(result))
    shown = CliRunner().invoke(cli.app, ["bench", "compare", *map(str, paths)], env={"COLUMNS": "120"})
    assert "worse" in shown.stdout
    assert "10.00" in shown.stdout
    assert "not the same load" not in shown.stdout
    paths[1].write_text(json.dumps({**second, "request_rate": "6", "total_input_tokens": 0}))
    shown = CliRunner().invoke(cli.app, ["bench", "compare", *map(str, paths)], env={"COLUMNS": "240"})
    assert f"not the same load: request_rate {first['request_rate']} and 6; prompt tokens a request" in shown.stdout
    paths[1].write_text(json.dumps({**second, "goodput_limits": "ttft:5"}))
    paths[0].write_text(json.dumps({**first, "goodput_limits": ""}))
    shown = CliRunner().invoke(cli.app, ["bench", "compare", *map(str, paths)], env={"COLUMNS": "240"})
    assert "not the same load: goodput_limits none and ttft:5" in shown.stdout


def test_one_goodput_flag_takes_several_limits():
    words = ["--goodput", "ttft:500", "tbt:60", "--seed", "1", "compare", "--goodput", "tpot:9"]
    flag = "--goodput"
    assert each_with_flag(words, flag) == [flag, "ttft:500", flag, "tbt:60", "--seed", "1", "compare", flag, "tpot:9"]


WRONG = {
    "--request-rate paced=0": "--request-rate is 'paced=0': give requests per second above 0",
    "--request-rate paced=1": "fast has no rate, and its requests would come all at once beside the others'",
    "--request-rate nobody=1": "--request-rate names 'nobody'; the models are fast, paced",
    "--burstiness 0 --request-rate 1": "burstiness is 0.0; it must be above 0",
    "--ramp-up-strategy fast": "ramp-up-strategy is 'fast'; it must be linear or exponential",
    "--ramp-up-strategy linear --duration 1": "a ramp needs --ramp-up-start-rps, --ramp-up-end-rps and --duration",
    "--ramp-up-strategy linear --ramp-up-start-rps 0 --ramp-up-end-rps 1 --duration 1": "start_rps of a ramp is 0.0",
    "--endpoint /v1/embeddings": "endpoint is '/v1/embeddings'",
    "--goodput ttft": "goodput is 'ttft'; it must be like ttft:500",
    "--metric-percentiles 50,x": "--metric-percentiles is '50,x'",
    "--percentile-metrics ttfs": "--percentile-metrics has 'ttfs'",
    "--extra-body [1]": "--extra-body is a list; give a JSON object",
    "--max-concurrency 0": "max-concurrency is 0",
    "--trace /nowhere.csv": "cannot read /nowhere.csv",
    "--tokenizer /nowhere": "--tokenizer is /nowhere",
    "--trace t.csv --request-rate 2": "--request-rate beside --trace, which has its own requests; use --trace-speed",
    "--trace t.csv --output-len 9": "--output-len beside --trace, which has its own requests; use --length-scale",
    "--burstiness 0.5": "burstiness is 0.5 of requests that all come at once; give --request-rate",
    "--num-prompts 0": "num-prompts is 0; it must be above 0",
    "--trace-start 5": "trace-start is 5 without --trace or --servegen-client",
    "--trace-start -1": "trace-start is -1.0; it must be 0 or more seconds",
    "--model nobody --num-prompts 1": "the warm-up request of nobody was not served: HTTP 404",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_is_one_line(url, words):
    shown = bench(url, *words.split())
    assert isinstance(shown.exception, CrossPoolError)
    assert WRONG[words] in str(shown.exception)
    assert "\n" not in str(shown.exception)


def test_each_model_may_have_a_server_of_its_own(url):
    shown = CliRunner().invoke(
        cli.app, ["bench", "--base-url", f"{FAST}={url}", "--base-url", f"paced={url}/v1", "--num-prompts", "2",
                  "--output-len", "3", "--json"],
    )  # fmt: skip
    assert {name: figures["completed"] for name, figures in json.loads(shown.stdout)["models"].items()} == {
        "all": 4, FAST: 2, "paced": 2
    }  # fmt: skip
    shown = CliRunner().invoke(cli.app, ["bench", "--base-url", f"{FAST}={url}", "--model", "paced"])
    assert "no --base-url for paced; give --base-url URL, or paced=URL" in str(shown.exception)


def test_no_server_is_one_line():
    shown = bench("http://127.0.0.1:9")
    assert isinstance(shown.exception, CrossPoolError)
    assert "no server answers at http://127.0.0.1:9" in str(shown.exception)


def test_help_has_every_option_below_a_heading():
    shown = CliRunner().invoke(cli.app, ["bench", "--help"], env={"COLUMNS": "100"}).stdout
    assert [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")] == [
        "Server:", "When requests come:", "What they are:", "Recorded traces:", "Measuring:", "Results:", "Others:",
        "Commands:",
    ]  # fmt: skip
    assert shown.partition("Others:")[2].partition("Commands:")[0].split()[0] in ("-h,", "--help"), "nothing else"
    assert "compare" in shown.partition("Commands:")[2]
