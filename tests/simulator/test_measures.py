"""Distributions by bins and averages over time against plain computations."""

from __future__ import annotations

import numpy as np
import pytest

from crosspool.simulator.measures import Distribution, ModelMeasures, TimeAverage, merged


def test_means_are_exact_and_quantiles_within_a_bin():
    rng = np.random.default_rng(3)
    values = rng.lognormal(-4, 1.5, 4000)
    found = Distribution()
    for value in values:
        found.add(float(value))
    assert found.mean == pytest.approx(values.mean())
    for share in (0.05, 0.5, 0.95, 0.99, 1.0):
        assert found.quantile(share) == pytest.approx(np.quantile(values, share, method="inverted_cdf"), rel=0.006)


def test_multiplicity_counts_and_zeros_are_kept():
    found = Distribution()
    found.add(0.0, 6)
    found.add(2.0, 3)
    found.add(8.0)
    assert found.count == 10
    assert found.mean == pytest.approx(1.4)
    assert found.quantile(0.5) == 0.0
    assert found.quantile(0.9) == pytest.approx(2.0, rel=0.01)
    assert found.quantile(0.95) == pytest.approx(8.0, rel=0.01)
    assert Distribution().quantile(0.5) == Distribution().mean == 0.0


def test_time_averages_weigh_by_duration():
    average = TimeAverage(1.0)
    average.add(10, 1.0)
    average.add(0, 7.0)
    average.add(4, 2.0)
    assert average.mean == pytest.approx(1.8)
    assert average.peak == 10
    assert average.quantile(0.69) == pytest.approx(1.0)
    assert average.quantile(0.85) == pytest.approx(5.0)
    assert average.quantile(1.0) == 10


def test_all_models_as_one():
    parts = [ModelMeasures(), ModelMeasures()]
    parts[0].tbt.add(1.0, 3)
    parts[1].tbt.add(5.0, 1)
    parts[0].refused["queue full"] = 2
    parts[1].refused["queue full"] = 1
    parts[1].num_arrived = 7
    whole = merged(parts)
    assert whole.tbt.mean == pytest.approx(2.0)
    assert whole.num_refused == 3
    assert whole.num_arrived == 7
