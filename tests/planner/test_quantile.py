"""Quantile intervals: exact ranks, coverage for independent and for dependent samples."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from crosspool.planner.quantile import binomial_quantile, estimate_grouped, estimate_quantile


@pytest.mark.parametrize(("trials", "probability", "level"), [(20, 0.5, 0.025), (20, 0.9, 0.975), (7, 0.3, 0.5)])
def test_binomial_quantiles_are_exact(trials, probability, level):
    mass = [comb(trials, k) * probability**k * (1 - probability) ** (trials - k) for k in range(trials + 1)]
    exact = next(k for k in range(trials + 1) if sum(mass[: k + 1]) >= level)
    assert binomial_quantile(trials, probability, level) == exact


def test_intervals_of_independent_samples_hold_the_truth_as_often_as_they_say():
    truth, hits = 2.3263478740408408, 0  # P99 of a standard normal
    for seed in range(400):
        estimate = estimate_quantile(np.random.default_rng(seed).standard_normal(2000), 0.99, 0.9)
        hits += estimate.low <= truth <= estimate.high
    assert 0.88 <= hits / 400 <= 0.97


def _autocorrelated(seed, num, memory=50):
    """Standard normals with correlation exp(-lag / memory)."""
    rng = np.random.default_rng(seed)
    keep = np.exp(-1 / memory)
    noise = rng.standard_normal(num) * np.sqrt(1 - keep**2)
    noise[0] = rng.standard_normal()
    values = np.empty(num)
    previous = 0.0
    for idx, step in enumerate(noise.tolist()):
        previous = step if idx == 0 else keep * previous + step
        values[idx] = previous
    return values


def test_intervals_of_dependent_samples_hold_the_truth_where_independent_ones_would_not():
    truth, grouped_hits, naive_hits, runs = 1.6448536269514722, 0, 0, 60  # P95
    for seed in range(runs):
        path = _autocorrelated(seed, 16000)
        grouped = estimate_grouped(path.reshape(32, -1), 0.95, 0.9)
        naive = estimate_quantile(path, 0.95, 0.9)
        grouped_hits += grouped.low <= truth <= grouped.high
        naive_hits += naive.low <= truth <= naive.high
        assert grouped.effective_samples < 2500
    assert grouped_hits / runs >= 0.8
    assert naive_hits / runs < 0.4


def test_groups_of_independent_samples_are_worth_nearly_all_of_them():
    estimate = estimate_grouped(np.random.default_rng(0).standard_normal((64, 1000)), 0.9)
    assert estimate.effective_samples > 0.4 * 64000


def test_an_interval_is_made_of_the_samples_of_exact_ranks():
    """Of 1, 2, ..., n the value of a sample is its rank: P[Binomial(n, q) <= k] gives the ranks by itself."""
    num, level = 200, 0.9
    estimate = estimate_quantile(np.arange(1, num + 1, dtype=float), level, 0.95)
    low, high = (binomial_quantile(num, level, tail) for tail in (0.025, 0.975))
    assert (estimate.low, estimate.value, estimate.high) == (low, 180.0, high + 1)


def test_few_groups_widen_the_interval():
    """At 3 degrees of freedom Student's t of 97.5 % is 3.18, the normal quantile 1.96."""
    groups = np.random.default_rng(3).standard_normal((4, 5000))
    few = estimate_grouped(groups, 0.9, most_effective=400.0)
    many = estimate_grouped(groups.reshape(400, 50), 0.9, most_effective=400.0)
    assert few.effective_samples == many.effective_samples == 400.0
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(3.18 / 1.96, rel=0.15)


def test_groups_are_worth_no_more_than_is_known_of_the_process():
    groups = np.random.default_rng(0).standard_normal((64, 1000))
    free, bound = estimate_grouped(groups, 0.9), estimate_grouped(groups, 0.9, most_effective=100.0)
    assert bound.effective_samples == 100.0
    assert bound.high - bound.low > 5 * (free.high - free.low)


def test_equal_samples_have_an_interval_of_no_width():
    estimate = estimate_grouped(np.full((8, 100), 5.0), 0.99)
    assert (estimate.low, estimate.value, estimate.high) == (5.0, 5.0, 5.0)
    assert estimate.relative_half_width == 0.0


def test_impossible_questions_are_refused():
    with pytest.raises(ValueError, match=r"quantile or confidence is 1\.0"):
        estimate_quantile(np.zeros(3), 1.0)
    with pytest.raises(ValueError, match="two or more"):
        estimate_grouped(np.zeros((1, 5)), 0.5)
    with pytest.raises(ValueError, match="no samples"):
        estimate_quantile(np.zeros(0), 0.5)
