"""Gaps between tokens are told by what was under way in the middle of them."""

from __future__ import annotations

import pytest

from benchmarks.layouts.company import gaps_by_company


def test_a_gap_has_the_company_that_was_there_halfway_through_it():
    run = {
        "request_models": ["a", "b", "a"],
        "start_times": [0.0, 2.0, 50.0],
        "ttfts": [1.0, 1.5, 0.5],
        "itls": [[1.0, 2.0, 1.0, 0.5], [0.5, 1.0], [0.25]],
    }
    # a: 1 .. 2 alone, 2 .. 4 beside the prompt of b (2 .. 3.5), 4 .. 5 beside its decode (3.5 .. 5), 5 .. 5.5 alone
    found = gaps_by_company(run, "a")
    assert found["beside_prompt"].tolist() == pytest.approx([2000.0])
    assert found["beside_decode"].tolist() == pytest.approx([1000.0])
    assert found["alone"].tolist() == pytest.approx([1000.0, 500.0, 250.0]), "its own other requests are no company"
    assert {name: len(gaps) for name, gaps in gaps_by_company(run, "b").items()} == {
        "beside_prompt": 0,
        "beside_decode": 2,
        "alone": 0,
    }
    assert sum(map(len, gaps_by_company(run, "c").values())) == 0
