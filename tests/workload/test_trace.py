"""Traces: order, model names, windows, and rows that cannot be."""

from __future__ import annotations

import pytest

from crosspool.workload.trace import make_trace


def small():
    return make_trace([5.0, 1.0, 3.0], [0, 1, 0], [10, 20, 30], [1, 2, 3], models=("a", "b"), duration_s=6.0)


def test_rows_come_sorted_by_arrival_and_keep_together():
    assert list(small().rows()) == [(1.0, "b", 20, 2), (3.0, "a", 30, 3), (5.0, "a", 10, 1)]


def test_one_models_rows_and_its_clock_stay():
    part = small().of_model("a")
    assert list(part.rows()) == [(3.0, "a", 30, 3), (5.0, "a", 10, 1)]
    assert part.duration_s == 6.0
    with pytest.raises(ValueError, match="no model 'c'; it has a, b"):
        small().of_model("c")


def test_windows_cut_half_open_and_start_a_new_clock():
    first, second = small().window(0.0, 3.0), small().window(3.0, 6.0)
    assert first.arrival_s.tolist() == [1.0]
    assert second.arrival_s.tolist() == [0.0, 2.0]
    assert first.duration_s == second.duration_s == 3.0


def test_several_names_may_become_one_model():
    renamed = small().renamed({"a": "x", "b": "x"})
    assert renamed.models == ("x",)
    assert renamed.model.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("arrival_s", [1.0, -2.0], "arrival_s of request 2 is -2.0"),
        ("arrival_s", [1.0, float("nan")], "arrival_s of request 2 is nan"),
        ("prompt_tokens", [1, -5], "prompt_tokens of request 2 is -5"),
        ("service_s", [-1.0, 2.0], "service_s of request 1 is -1.0"),
    ],
)
def test_wrong_values_are_named(column, values, message):
    columns = {"arrival_s": [1.0, 2.0], "prompt_tokens": [1, 1], "service_s": [1.0, 1.0], column: values}
    with pytest.raises(ValueError, match=message):
        make_trace(
            columns["arrival_s"],
            [0, 0],
            columns["prompt_tokens"],
            [1, 1],
            models=("a",),
            service_s=columns["service_s"],
        )


def test_a_duration_shorter_than_the_trace_is_refused():
    with pytest.raises(ValueError, match=r"lasts 2.0 s, but a request arrives at 3.0 s"):
        make_trace([3.0], [0], [1], [1], models=("a",), duration_s=2.0)
