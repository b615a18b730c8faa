"""Arrival processes: rate, burstiness, stationarity from the first second, repetition of a period."""

from __future__ import annotations

import numpy as np
import pytest

from crosspool.workload.arrivals import GammaBursts, Poisson, Ramp, RateWindow, RecordedArrivals, WindowedBursts


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("process", "cv"),
    [(Poisson(rate_rps=2.0), 1.0), (GammaBursts(rate_rps=2.0, cv=3.0), 3.0), (GammaBursts(rate_rps=2.0, cv=0.4), 0.4)],
)
def test_rate_and_burstiness_are_those_asked_for(process, cv):
    times = process.draw(rng(), 100.0, 40100.0)
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 100.0
    assert times[-1] < 40100.0
    gaps = np.diff(times)
    assert len(times) / 40000.0 == pytest.approx(process.rate_rps, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_bursts_are_stationary_from_the_first_second():
    """As many arrivals in the first tenth of a window as in the last, over many draws: nothing starts empty or full."""
    process = GammaBursts(rate_rps=1.0, cv=4.0)
    draws = [process.draw(rng(seed), 0.0, 50.0) for seed in range(4000)]
    first = sum(int(np.searchsorted(times, 5.0)) for times in draws) / len(draws)
    last = sum(len(times) - int(np.searchsorted(times, 45.0)) for times in draws) / len(draws)
    assert first == pytest.approx(5.0, rel=0.08)
    assert last == pytest.approx(5.0, rel=0.08)


def test_windows_have_their_own_rates_and_repeat():
    windows = (RateWindow(start_s=0.0, rate_rps=5.0, cv=2.0), RateWindow(start_s=200.0, rate_rps=1.0))
    process = WindowedBursts(windows=windows, window_s=100.0, period_s=400.0)
    times = process.draw(rng(), -4000.0, 4000.0) % 400.0
    counts = np.histogram(times, bins=[0, 100, 200, 300, 400])[0] / (20 * 100.0)
    assert counts == pytest.approx([5.0, 0.0, 1.0, 0.0], rel=0.15)
    assert process.rate_rps == pytest.approx(1.5)
    assert process.scaled(2.0).rate_rps == pytest.approx(3.0)


def test_overlapping_windows_and_short_periods_are_refused():
    windows = (RateWindow(start_s=0.0, rate_rps=1.0), RateWindow(start_s=50.0, rate_rps=1.0))
    with pytest.raises(ValueError, match="overlap"):
        WindowedBursts(windows=windows, window_s=100.0)
    with pytest.raises(ValueError, match="period"):
        WindowedBursts(windows=windows[1:], window_s=100.0, period_s=120.0)


def test_recorded_arrivals_repeat_with_their_rows():
    process = RecordedArrivals(times_s=np.array([1.0, 4.0, 9.0]), period_s=10.0)
    times, rows = process.indexed(-5.0, 12.0)
    assert times.tolist() == [-1.0, 1.0, 4.0, 9.0, 11.0]
    assert rows.tolist() == [2, 0, 1, 2, 0]
    assert process.rate_rps == pytest.approx(0.3)


def test_impossible_rates_are_refused():
    with pytest.raises(ValueError, match="rate is -1"):
        Poisson(rate_rps=-1.0)
    with pytest.raises(ValueError, match="cv is 0"):
        GammaBursts(rate_rps=1.0, cv=0.0)
    assert len(GammaBursts(rate_rps=0.0, cv=2.0).draw(rng(), 0.0, 10.0)) == 0


@pytest.mark.parametrize("is_exponential", [False, True])
@pytest.mark.parametrize(("start", "end"), [(1.0, 9.0), (9.0, 1.0), (4.0, 4.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(is_exponential, start, end):
    ramp = Ramp(start_rps=start, end_rps=end, duration_s=4000.0, is_exponential=is_exponential)
    times = ramp.draw(rng(), -50.0, 9000.0)
    assert 0 <= times[0] <= times[-1] < 4000.0
    assert len(times) / 4000.0 == pytest.approx(ramp.rate_rps, rel=0.05)
    middle = (start * end) ** 0.5 if is_exponential else (start + end) / 2
    for moment, rate in ((0.0, start), (1900.0, middle), (3800.0, end)):
        found = np.count_nonzero((times >= moment) & (times < moment + 200.0)) / 200.0
        assert found == pytest.approx(rate, rel=0.25), moment


def test_a_ramp_without_a_rate_is_refused():
    with pytest.raises(ValueError, match="end_rps of a ramp is 0; it must be above 0"):
        Ramp(start_rps=1, end_rps=0, duration_s=1)
