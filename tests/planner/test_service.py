"""The fixed point between demand and cost: it agrees with itself, grows with load, and says when there is none."""

from __future__ import annotations

import pytest

from crosspool.errors import CapacityError
from crosspool.planner.catalogue import catalogue_facts
from crosspool.planner.gpus import gpu_kind
from crosspool.planner.request_table import SteadySpeed
from crosspool.planner.service import RooflineCost, Traffic, agree
from tests.support.planning import table

COST = RooflineCost(kind=gpu_kind("h200"), num_kv_ranks=1, num_weights_ranks=1, max_num_seqs=64, chunk_tokens=512)


def traffic(rate, name="qwen3-30b-a3b"):
    return Traffic(facts=catalogue_facts(name), rate_rps=rate, requests=table([1000], [500], [1.0]))


def linear(items):
    """Time between tokens of 1 ms and 1 ms for each request alive: T = 0.5 (1 + rate T) has a solution by hand."""
    return {
        item.facts.name: SteadySpeed(tbt_s=1e-3 * (1 + item.rate_rps * item.requests.mean_service_s)) for item in items
    }


def test_a_fixed_point_by_hand():
    speeds, iterations = agree([traffic(1.0)], linear, tolerance=1e-6)
    service = 500 * speeds["qwen3-30b-a3b"].tbt_s
    assert service == pytest.approx(0.5 / (1 - 0.5 * 1.0), rel=1e-4)
    assert iterations > 1


def test_no_fixed_point_is_an_error_with_the_remedy():
    with pytest.raises(CapacityError, match="service times do not settle: qwen3-30b-a3b"):
        agree([traffic(2.5)], linear)


def test_roofline_speeds_agree_with_the_demand_they_cause():
    items = [traffic(0.5), traffic(0.3, "glm-4.7-flash")]
    speeds, _ = agree(items, COST)
    served = [
        Traffic(facts=item.facts, rate_rps=item.rate_rps, requests=item.requests.with_service(speeds[item.facts.name]))
        for item in items
    ]
    again = COST(served)
    for name, speed in speeds.items():
        assert again[name].tbt_s == pytest.approx(speed.tbt_s, rel=2e-3)


def test_load_and_company_slow_a_model_down():
    alone = agree([traffic(0.05)], COST)[0]["qwen3-30b-a3b"].tbt_s
    busy = agree([traffic(4.0)], COST)[0]["qwen3-30b-a3b"].tbt_s
    company = agree([traffic(0.05), traffic(2.0, "mixtral-8x7b")], COST)[0]["qwen3-30b-a3b"].tbt_s
    assert alone < busy
    assert alone < company


def test_more_requests_than_may_run_are_refused():
    with pytest.raises(CapacityError, match=r"qwen3-30b-a3b .* more than max_num_seqs 64|do not settle"):
        agree([traffic(100.0)], COST)
