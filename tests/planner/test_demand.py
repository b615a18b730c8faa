"""Active KV against closed forms, and the three classic mistakes: each test fails when its mistake is made."""

from __future__ import annotations

import numpy as np
import pytest

from crosspool.planner.demand import along_path, draw_path, mean_bytes, snapshots, variance_bytes
from crosspool.planner.request_table import SteadySpeed, table_from_trace
from crosspool.workload.arrivals import GammaBursts, RecordedArrivals
from crosspool.workload.trace import make_trace
from tests.support.planning import KV_BYTES, load, random_table, table

NUM = 150_000


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("seed", range(10))
def test_snapshots_agree_with_the_closed_forms(seed):
    """Mean within 0.5 %, variance within 2 %, for ten random workloads."""
    requests = random_table(seed)
    one = load(requests, arrivals=8.0 / requests.mean_service_s)
    found = snapshots(one, rng(seed + 100), NUM).exact
    assert found.mean() == pytest.approx(mean_bytes(one), rel=0.005)
    assert found.var() == pytest.approx(variance_bytes(one), rel=0.02)


def test_closed_forms_by_hand():
    """One kind of request: 10 prompt, 6 output, 4 s, 0.5/s: 2 live, 13 tokens each on average."""
    one = load(table([10], [6], [4.0]), arrivals=0.5)
    assert mean_bytes(one) == pytest.approx(2 * 13 * KV_BYTES)
    assert variance_bytes(one) == pytest.approx(2 * (100 + 60 + 12) * KV_BYTES**2)


def test_length_bias_is_not_forgotten():
    """Half the requests stay 1 s and half 99 s: a request met at random is almost always a long one."""
    one = load(table([100, 1000], [1, 1], [1.0, 99.0]), arrivals=0.02)
    found = snapshots(one, rng(), NUM).exact
    unbiased = one.mean_live * (550 + 0.5) * KV_BYTES  # what drawing rows alike would give
    assert found.mean() == pytest.approx(mean_bytes(one), rel=0.01)
    assert abs(unbiased / mean_bytes(one) - 1) > 0.4


def test_columns_are_not_drawn_apart():
    """Long prompts here stay long. Independent marginals would give 3.0 MB where the truth is 5.0 MB."""
    one = load(table([100, 900], [1, 1], [1.0, 9.0]), arrivals=1.0)
    apart = one.arrivals.rate_rps * 5.0 * 500.5 * KV_BYTES
    for found in (snapshots(one, rng(), NUM).exact.mean(), _path(one, 200_000.0).exact.mean()):
        assert found == pytest.approx(mean_bytes(one), rel=0.02)
        assert found > 1.5 * apart


def _path(one, length_s, num=100_000):
    return along_path(one, rng(5), np.linspace(0.0, length_s, num))


def test_a_window_opens_on_a_pool_in_use():
    """Requests that arrived before the window count: its first moments hold as much as its last."""
    one = load(table([1000], [1], [500.0]), arrivals=0.2)
    moments = np.linspace(0.0, 1000.0, 200)
    paths = np.stack([along_path(one, rng(seed), moments).exact for seed in range(300)])
    first, last = paths[:, :10].mean(), paths[:, -10:].mean()
    assert first == pytest.approx(mean_bytes(one), rel=0.03)
    assert last == pytest.approx(mean_bytes(one), rel=0.03)
    times, _ = draw_path(one, rng(), 0.0, 1000.0)
    assert times.min() < 0


@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_the_mean_does_not_depend_on_burstiness_but_the_spread_does(cv):
    requests = table([100, 300], [50, 20], [5.0, 2.0])
    one = load(requests, GammaBursts(rate_rps=1.0, cv=cv))
    found = _path(one, 400_000.0).exact
    assert found.mean() == pytest.approx(mean_bytes(one), rel=0.02)
    poisson = variance_bytes(one)
    assert (found.var() > 1.5 * poisson) if cv > 1 else (found.var() < 0.9 * poisson)


def test_a_recorded_path_by_hand():
    """Two overlapping requests, seen while none, one, both and one of them are there; then again a period later."""
    requests = table([10, 100], [4, 8], [4.0, 4.0])
    one = load(requests, RecordedArrivals(times_s=np.array([2.0, 4.0]), period_s=20.0))
    moments = np.array([1.0, 3.0, 4.0, 5.0, 6.0, 8.0, 23.0])
    tokens = np.array([0.0, 11.0, 12.0 + 100.0, 13.0 + 102.0, 104.0, 0.0, 11.0])
    found = along_path(one, rng(), moments)
    assert found.exact == pytest.approx(tokens * KV_BYTES)
    pages = np.array([0, 1, 1 + 7, 1 + 7, 7, 0, 1])
    assert found.paged == pytest.approx(pages * 16.0 * KV_BYTES)


def test_requests_alive_over_the_end_of_a_period_are_there_at_its_start():
    requests = table([50], [1], [10.0])
    one = load(requests, RecordedArrivals(times_s=np.array([95.0]), period_s=100.0))
    assert along_path(one, rng(), np.array([2.0])).exact[0] > 50 * KV_BYTES
    assert along_path(one, rng(), np.array([6.0])).exact[0] == 0.0


def test_reserved_kv_is_prompt_and_max_tokens_for_the_whole_stay():
    requests = table([10], [6], [4.0], max_tokens=[100])
    forecast, reserve = load(requests, policy="forecast"), load(requests, policy="reserve")
    assert mean_bytes(reserve) == pytest.approx(2 * 110 * KV_BYTES)
    assert mean_bytes(forecast) == pytest.approx(2 * 13 * KV_BYTES)
    assert snapshots(reserve, rng(), NUM).exact.mean() == pytest.approx(mean_bytes(reserve), rel=0.005)


def test_whole_pages_are_at_least_the_tokens_and_less_than_a_page_more_each():
    one = load(random_table(3), arrivals=1.0)
    found = snapshots(one, rng(), 20_000)
    assert np.all(found.paged >= found.exact)
    assert (found.paged - found.exact).mean() == pytest.approx(one.mean_live * 16 * KV_BYTES / 2, rel=0.1)


def test_fixed_state_is_held_beside_the_tokens():
    requests = table([10], [6], [4.0])
    with_state = load(requests, state_bytes=5_000_000)
    assert mean_bytes(with_state) == pytest.approx(2 * (13 * KV_BYTES + 5_000_000))
    assert snapshots(with_state, rng(), NUM).paged.mean() == pytest.approx(2 * (16 * KV_BYTES + 5_000_000), rel=0.01)


def test_chunks_do_not_change_the_result(monkeypatch):
    one = load(random_table(4), GammaBursts(rate_rps=1.0, cv=2.0))
    moments = np.linspace(0.0, 3000.0, 5000)
    whole = along_path(one, rng(7), moments).exact
    monkeypatch.setattr("crosspool.planner.demand.MAX_PAIRS", 100)
    assert along_path(one, rng(7), moments).exact == pytest.approx(whole)


def test_recorded_service_times_win_over_a_speed():
    trace = make_trace([0.0, 1.0], [0, 0], [10, 10], [5, 0], models=("m",), service_s=[3.0, float("nan")])
    rows = table_from_trace(trace, SteadySpeed(tbt_s=0.5))
    assert rows.service_s.tolist() == [3.0, 0.5]
    assert rows.output_tokens.tolist() == [5, 1]
    with pytest.raises(ValueError, match="no service times"):
        table_from_trace(trace, None)
