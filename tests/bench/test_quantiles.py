"""Percentiles and their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from crosspool.bench.quantiles import percentile_estimates


def test_values_are_numpys_percentiles():
    groups = [np.arange(10.0), np.arange(5.0)]
    found = percentile_estimates(groups, (50, 95))
    assert [item.value for item in found] == np.percentile(np.concatenate(groups), (50, 95)).tolist()


def test_the_interval_holds_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    held = 0
    for run in range(100):
        groups = [np.array([value]) for value in rng.exponential(size=60)]
        (item,) = percentile_estimates(groups, (50,), seed=run)
        held += item.low <= np.log(2) <= item.high
    assert 88 <= held <= 100


def test_values_of_one_request_do_not_count_as_independent():
    """A thousand equal gaps in each of ten requests tell no more than ten values do."""
    means = np.random.default_rng(0).exponential(size=10)
    (grouped,) = percentile_estimates([np.full(1000, mean) for mean in means], (50,))
    (scattered,) = percentile_estimates([np.array([mean]) for mean in np.repeat(means, 1000)], (50,))
    assert grouped.high - grouped.low > 3 * (scattered.high - scattered.low)


def test_a_request_without_values_changes_nothing_but_the_interval():
    (item,) = percentile_estimates([np.array([1.0, 2.0, 3.0]), np.empty(0)], (50,))
    assert item.value == 2.0
    assert item.low <= 2.0 <= item.high
    with pytest.raises(ValueError, match="no values"):
        percentile_estimates([np.empty(0)], (50,))
