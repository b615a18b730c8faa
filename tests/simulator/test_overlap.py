"""Slowdowns of lanes that run together."""

from __future__ import annotations

import pytest

from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.simulator.overlap import PipelineOverlap, RunningStep, SharedGPUs
from crosspool.simulator.pipeline import OrderedPipeline, Route
from tests.support.simulating import stages

POOLS = Route(kv=0, weights=1)


def overlap(policy="ticket") -> PipelineOverlap:
    return PipelineOverlap(lambda lanes: OrderedPipeline(2, lanes, ORDER_POLICIES[policy]))


def test_nobody_slows_a_lane_alone():
    assert overlap().slowdowns([RunningStep(stages(), POOLS)]) == [1.0]


def test_two_equal_lanes_slow_each_other_as_the_bound_says():
    times = stages(20, 40, 3)
    expected = 2 * 40 / (20 + 40 + 6)
    assert overlap().slowdowns([RunningStep(times, POOLS)] * 2) == pytest.approx([expected] * 2, rel=0.03)


def test_a_share_beside_attention_is_told_apart_from_none():
    known, times = overlap(), stages(20, 40, 3, beside=30)
    expected = 2 * (20 + 30) / (20 + 40 + 6)
    assert known.slowdowns([RunningStep(times, POOLS)] * 2) == pytest.approx([expected] * 2, rel=0.03)
    assert known.slowdowns([RunningStep(stages(20, 40, 3), POOLS)] * 2) < [0.9 * expected] * 2


def test_what_a_slowdown_says_is_what_the_pipeline_does():
    first, second = stages(20, 30, 3, tail=150, layers=48), stages(12, 45, 3, tail=100, layers=27)
    pipeline = OrderedPipeline(2, 2, ORDER_POLICIES["ticket"])
    times, ended = (first, second), [0, 0]
    for lane in (0, 1):
        pipeline.start(lane, times[lane], POOLS, 0.0)
    while min(ended) < 50:
        lane = pipeline.advance(float("inf"))
        ended[lane] += 1
        pipeline.start(lane, times[lane], POOLS, pipeline.now_s)
    slowdowns = overlap().slowdowns([RunningStep(first, POOLS), RunningStep(second, POOLS)])
    for lane in (0, 1):
        assert slowdowns[lane] == pytest.approx(pipeline.now_s / ended[lane] / times[lane].step_s, rel=0.03)


def test_all_times_twice_as_long_make_no_difference_and_cost_nothing():
    known = overlap()
    one = known.slowdowns([RunningStep(stages(20, 30, 3, 100), POOLS), RunningStep(stages(15, 40, 3, 80), POOLS)])
    assert known.num_known == 1
    e = 2.718281828459045
    scaled = [stages(20 * e, 30 * e, 3 * e, 100 * e), stages(15 * e, 40 * e, 3 * e, 80 * e)]
    assert known.slowdowns([RunningStep(times, POOLS) for times in scaled]) == one
    assert known.num_known == 1


def test_a_prefill_lane_gives_way_under_priority():
    decode = RunningStep(stages(20, 30, 3), Route(kv=0, weights=1, priority=0))
    prefill = RunningStep(stages(30, 60, 3), Route(kv=0, weights=1, priority=1))
    by_priority = overlap("priority").slowdowns([decode, decode, prefill])
    by_ticket = overlap("ticket").slowdowns([decode, decode, prefill])
    assert by_priority[0] < by_ticket[0]
    assert by_priority[2] > by_ticket[2]


def test_steps_on_one_gpu_share_it_and_the_busiest_gpu_sets_the_pace():
    alone, wide, narrow = (RunningStep(stages(), POOLS, gpus) for gpus in ((4,), (0, 1, 2), (2,)))
    assert SharedGPUs().slowdowns([alone, wide, narrow, narrow]) == [1.0, 3.0, 3.0, 3.0]
