"""Goodput: which requests keep every limit."""

from __future__ import annotations

import pytest

from crosspool.bench.record import RequestRecord
from crosspool.bench.slo import parse_objective


def record(*token_times_s, outcome="served"):
    return RequestRecord(
        index=0,
        model="m",
        prompt_tokens=1,
        due_s=0.0,
        started_s=1.0,
        token_times_s=list(token_times_s),
        output_tokens=len(token_times_s),
        outcome=outcome,
    )


@pytest.mark.parametrize(
    ("limits", "is_met"),
    [
        ("", True),
        ("ttft:100", True),
        ("ttft:99", False),
        ("tbt:301", True),
        ("tbt:299", False),  # one long gap is enough
        ("itl:299", False),
        ("tpot:201", True),
        ("tpot:199", False),
        ("e2el:501", True),
        ("ttft:101 e2el:499", False),
    ],
)
def test_every_limit_has_to_be_kept(limits, is_met):
    assert parse_objective([limits]).is_met(record(1.0999999, 1.2, 1.5)) is is_met


def test_what_was_not_served_keeps_nothing():
    assert not parse_objective([]).is_met(record(1.1, outcome="failed"))


def test_an_answer_of_one_token_has_no_gap():
    assert parse_objective(["tbt:1", "tpot:1"]).is_met(record(1.1))
