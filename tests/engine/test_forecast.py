"""How many tokens are set aside for an output: its worst case, or a quantile of the model's latest longer ones."""

from __future__ import annotations

import pytest

from crosspool.engine.forecast import MIN_LENGTHS, NUM_LENGTHS_KEPT, Forecast, Reserve, output_estimate


def learned(quantile: float, lengths: list[int]) -> Forecast:
    forecast = Forecast(quantile)
    for length in lengths:
        forecast.record("p", length)
    return forecast


def test_reserve_sets_everything_aside() -> None:
    estimate = output_estimate("reserve", 0.9)
    assert isinstance(estimate, Reserve)
    for _ in range(MIN_LENGTHS):
        estimate.record("p", 5)
    assert estimate.expected_tokens("p", 3, 700) == 700


@pytest.mark.parametrize(("quantile", "expected"), [(0.9, 18), (0.875, 18), (0.85, 17), (1.0, 20), (0.01, 1)])
def test_the_quantile_is_the_smallest_length_that_so_many_do_not_exceed(quantile: float, expected: int) -> None:
    forecast = learned(quantile, list(range(20, 0, -1)))
    assert forecast.expected_tokens("p", 0, 700) == expected


def test_only_outputs_longer_than_what_there_is_count() -> None:
    forecast = learned(0.5, list(range(1, 41)))
    assert forecast.expected_tokens("p", 20, 700) == 30
    assert forecast.expected_tokens("p", 40 - MIN_LENGTHS, 700) == 40 - MIN_LENGTHS + MIN_LENGTHS // 2
    assert forecast.expected_tokens("p", 40 - MIN_LENGTHS + 1, 700) == 700  # too few longer ones are known
    assert forecast.expected_tokens("p", 20, 25) == 25
    assert forecast.expected_tokens("q", 0, 700) == 700


def test_old_lengths_are_forgotten() -> None:
    forecast = learned(1.0, [900] + [10] * (NUM_LENGTHS_KEPT - 1))
    assert forecast.expected_tokens("p", 0, 1000) == 900
    forecast.record("p", 10)
    assert forecast.expected_tokens("p", 0, 1000) == 10
    forecast.forget("p")
    assert forecast.expected_tokens("p", 0, 1000) == 1000
