"""The pool's demand: seeds, order, coverage, pooling, honest intervals, monotone in rate, lengths and service time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosspool.planner.demand import along_path
from crosspool.planner.pool_demand import demand_over_time, estimate_pool
from crosspool.planner.request_table import RequestTable
from crosspool.workload.arrivals import GammaBursts, RateWindow, RecordedArrivals, WindowedBursts
from tests.support.planning import load, random_table, table


def three():
    return [load(random_table(seed, 512), arrivals=0.3, name=f"m{seed}") for seed in range(3)]


def test_the_same_seed_gives_the_same_demand_in_any_order():
    first, again = estimate_pool(three(), seed=4), estimate_pool(three()[::-1], seed=4)
    assert again.paged == first.paged
    assert again.exact.value == pytest.approx(first.exact.value)
    assert estimate_pool(three(), seed=5).samples[0:9].tolist() != first.samples[0:9].tolist()


def test_the_interval_is_as_narrow_as_asked():
    demand = estimate_pool(three(), precision=0.02)
    assert demand.reached
    assert demand.paged.relative_half_width <= 0.02
    finer = estimate_pool(three(), precision=0.01)
    assert finer.paged.num_samples > demand.paged.num_samples
    assert abs(finer.paged.value / demand.paged.value - 1) < 0.04


def test_budget_covers_stationary_load_as_often_as_it_says():
    """Over more than 5,000 residence times, time above the P95 is 5 % within one point."""
    loads = three()
    demand = estimate_pool(loads, quantile=0.95, precision=0.02)
    stay = max(one.requests.mean_service_s for one in loads)
    moments = np.linspace(0.0, 8000 * stay, 60_000)
    held = sum(along_path(one, np.random.default_rng([9, idx]), moments).paged for idx, one in enumerate(loads))
    above = float((held > demand.paged.value).mean())
    assert above == pytest.approx(0.05, abs=0.01)
    assert demand.covered(demand.paged.value) == pytest.approx(0.95, abs=0.005)


def test_bursty_load_needs_more_than_poisson_load_of_the_same_rate():
    requests = table([1000, 2000], [100, 300], [10.0, 20.0])
    poisson = estimate_pool([load(requests, 0.5)], precision=0.03)
    bursty = estimate_pool([load(requests, GammaBursts(rate_rps=0.5, cv=4.0))], precision=0.03)
    assert bursty.mean_bytes == pytest.approx(poisson.mean_bytes)
    assert bursty.paged.low > 1.3 * poisson.paged.high


def test_bursty_intervals_hold_the_value_of_a_longer_run():
    one = [load(table([1000], [200], [20.0]), GammaBursts(rate_rps=0.2, cv=3.0))]
    coarse = estimate_pool(one, precision=0.2, seed=1, confidence=0.99)
    fine = estimate_pool(one, precision=0.01, seed=2)
    assert coarse.paged.low <= fine.paged.value <= coarse.paged.high


def test_models_that_peak_together_are_added_as_they_peak():
    """Two models busy in the same hour need twice one; busy in different hours, hardly more than one."""
    requests = table([1000], [10], [30.0])

    def busy(hour, name):
        windows = (RateWindow(start_s=3600.0 * hour, rate_rps=1.0),)
        return load(requests, WindowedBursts(windows=windows, window_s=3600.0, period_s=14400.0), name=name)

    alone = estimate_pool([busy(0, "a")], precision=0.05)
    together = estimate_pool([busy(0, "a"), busy(0, "b")], precision=0.05)
    apart = estimate_pool([busy(0, "a"), busy(2, "b")], precision=0.05)
    assert together.paged.value > 1.7 * alone.paged.value
    assert apart.paged.value < 1.2 * alone.paged.value
    assert apart.pooling_gain > 1.6


def test_a_short_trace_admits_that_it_is_short():
    times = np.sort(np.random.default_rng(0).uniform(0, 600, 60))
    requests = table(list(range(500, 560)), [50] * 60, [20.0] * 60)
    arrivals = RecordedArrivals(times_s=times, period_s=600.0)
    demand = estimate_pool([load(requests, arrivals, page_tokens=1)], precision=0.001)
    assert not demand.reached
    assert demand.paged.effective_samples <= 30
    assert demand.paged.low < demand.paged.value <= demand.paged.high


def test_pooling_gain_grows_with_the_number_of_cold_models():
    def gain(num):
        loads = [load(random_table(1, 512), arrivals=0.05, name=f"m{idx}") for idx in range(num)]
        return estimate_pool(loads, precision=0.05).pooling_gain

    assert 1.0 <= gain(1) < 1.01
    assert gain(1) < gain(4) < gain(32)


def test_nothing_to_plan_is_refused():
    with pytest.raises(ValueError, match="no model has a load"):
        estimate_pool([])
    with pytest.raises(ValueError, match="precision is 0"):
        estimate_pool(three(), precision=0.0)


def test_a_silent_model_holds_nothing():
    demand = estimate_pool([load(random_table(1, 64), arrivals=0.0)])
    assert demand.paged.value == 0.0
    assert demand.pooling_gain == 1.0


def test_a_picture_has_one_line_a_model():
    moments, held = demand_over_time(three(), seed=0, num=64)
    assert moments.shape == (64,)
    assert held.shape == (3, 64)


def _scaled(requests: RequestTable, prompt=1.0, output=1.0, service=1.0) -> RequestTable:
    grown = np.ceil(requests.output_tokens * output).astype(np.int64)
    return replace(
        requests,
        prompt_tokens=np.ceil(requests.prompt_tokens * prompt).astype(np.int64),
        output_tokens=grown,
        max_tokens=grown,
        service_s=requests.service_s * service,
    )


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    what=st.sampled_from(["rate", "prompt", "output", "service"]),
    factor=st.floats(1.3, 3.0),
    bursty=st.booleans(),
)
def test_demand_is_monotone_in_rate_lengths_and_service_time(seed, what, factor, bursty):
    requests = random_table(seed, 256)
    rate = 3.0 / requests.mean_service_s
    more = requests if what == "rate" else _scaled(requests, **{what: factor})
    grown = rate * factor if what == "rate" else rate

    def high_and_low(rows, rps):
        arrivals = GammaBursts(rate_rps=rps, cv=2.0) if bursty else rps
        estimate = estimate_pool([load(rows, arrivals)], quantile=0.9, precision=0.05, seed=seed)
        return estimate.paged.high, estimate.paged.low, estimate.mean_bytes

    _, low, mean = high_and_low(requests, rate)
    high, _, more_mean = high_and_low(more, grown)
    assert high >= low
    assert more_mean > mean
