"""Queue times from /metrics."""

from __future__ import annotations

import pytest

from crosspool.bench.server_times import queue_times_between, read_queue_times


def text(prefix, num, model="m"):
    name = f"{prefix}:request_queue_time_seconds"
    return (
        f"# TYPE {name} histogram\n"
        f'{name}_bucket{{le="0.1",model_name="{model}"}} {num / 2}\n'
        f'{name}_bucket{{le="1.0",model_name="{model}"}} {num}\n'
        f'{name}_bucket{{le="+Inf",model_name="{model}"}} {num}\n'
        f'{name}_count{{model_name="{model}"}} {num}\n{name}_sum{{model_name="{model}"}} {0.2 * num}\n'
    )


def test_only_the_run_between_is_counted():
    between = queue_times_between(read_queue_times(text("vllm", 4)), read_queue_times(text("vllm", 24)))
    assert between["m"].num == 20
    figures = between["m"].as_dict()
    assert figures["mean_ms"] == pytest.approx(200)
    assert figures["p50_ms"] == pytest.approx(100)
    assert figures["p95_ms"] == pytest.approx(910)
    assert between["m"].as_dict(0.3)["p95_ms"] == 300, "no request waited longer, so the bucket is not filled evenly"


def test_our_own_names_win_over_others_beside_them():
    assert read_queue_times(text("vllm", 4) + text("crosspool", 6))["m"].num == 6


def test_a_server_without_the_histogram_tells_nothing():
    assert read_queue_times("# TYPE x counter\nx_total 1\n") == {}


def test_series_of_an_engines_ranks_are_added_and_sglangs_name_is_known():
    rows = []
    for rank in "01":
        labels = f'model_name="m",dp_rank="{rank}"'
        rows += [
            f'sglang:queue_time_seconds_bucket{{{labels},le="0.1"}} 2',
            f'sglang:queue_time_seconds_bucket{{{labels},le="+Inf"}} 3',
        ]
        rows += [f"sglang:queue_time_seconds_sum{{{labels}}} 0.5", f"sglang:queue_time_seconds_count{{{labels}}} 3"]
    text = "\n".join(["# TYPE sglang:queue_time_seconds histogram", *rows, ""])
    times = read_queue_times(text)["m"]
    assert (times.num, times.total_s) == (6, 1.0)
    assert times.buckets == ((0.1, 4.0), (float("inf"), 6.0))
    assert times.quantile_s(0.5) == pytest.approx(0.075)
