"""Slowdowns of lanes that run together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.simulator.overlap import AlternatingGPUs, PipelineOverlap, RunningStep, SharedGPUs
from crosspool.simulator.pipeline import OrderedPipeline, Route
from crosspool.simulator.sharing import Sharing
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


def whole(model, gpus=(0,), is_prompt=False, layers=48, attention=20):
    sharing = Sharing(longer_s=30e-6, prompt_slower=1.5)
    return RunningStep(stages(attention, 30, 0, layers), POOLS, gpus, model=model, is_prompt=is_prompt, sharing=sharing)


def test_models_on_one_gpu_share_it_and_the_busiest_gpu_sets_the_pace():
    alone, wide = whole("a", (4,)), whole("b", (0, 1, 2))
    narrow, other = whole("c", (2,)), whole("d", (2,))
    assert SharedGPUs().slowdowns([alone, wide, narrow, other]) == [1.0, 3.0, 3.0, 3.0]


def test_a_models_own_prompt_costs_its_decode_a_time_for_each_layer_and_no_equal_part():
    decode, prompt, other = whole("a"), whole("a", is_prompt=True), whole("b")
    longer = 1 + 30e-6 / decode.layer_s
    assert SharedGPUs().slowdowns([decode, prompt]) == pytest.approx([longer, 1.5])
    assert SharedGPUs().slowdowns([prompt]) == [1.0]
    assert SharedGPUs().slowdowns([decode, prompt, other]) == pytest.approx([2 * longer, 3.0, 2.0])


def test_streams_of_one_process_alternate_by_the_layer():
    """A shallow model waits for a layer of the deep one in each of its own, and both take the sum of their layers."""
    deep, shallow = whole("a", layers=48, attention=60), whole("b", layers=24, attention=20)
    slowdowns = AlternatingGPUs().slowdowns([deep, shallow])
    both = deep.layer_s + shallow.layer_s
    assert slowdowns == pytest.approx([both / deep.layer_s, both / shallow.layer_s])
    assert slowdowns[1] > 2 > slowdowns[0]
    assert AlternatingGPUs().slowdowns([deep, whole("b", (1,))]) == [1.0, 1.0]
    beside = AlternatingGPUs().slowdowns([deep, whole("b", is_prompt=True)])
    assert beside == pytest.approx([1 + 30e-6 / deep.layer_s, 1.5])


def test_attention_of_one_row_is_latency_that_others_run_under():
    """Of two models; nobody is quicker for it than alone."""
    first, second = (replace(whole(name), lone_s=15e-6) for name in "ab")
    together = (first.layer_s + second.layer_s - 2 * 15e-6) / first.layer_s
    assert AlternatingGPUs().slowdowns([first, second]) == pytest.approx([together] * 2)
    assert AlternatingGPUs().slowdowns([first]) == [1.0]
    small = replace(whole("b"), lone_s=whole("b").layer_s)
    assert AlternatingGPUs().slowdowns([first, small]) == [1.0, 1.0]


def test_a_chunk_beside_decode_takes_what_its_patience_allows_or_what_it_needs():
    patient, quick = (replace(whole("a", is_prompt=True), allowed_s=allowed_s) for allowed_s in (90e-6, 10e-6))
    rest_s = 1.5 * (patient.layer_s - 30e-6)
    expected = (rest_s + 90e-6) / patient.layer_s
    assert AlternatingGPUs().slowdowns([whole("a"), patient])[1] == pytest.approx(expected)
    assert AlternatingGPUs().slowdowns([whole("a"), quick])[1] == pytest.approx(1.5)
    assert SharedGPUs().slowdowns([whole("a"), patient])[1] == pytest.approx(expected)
    assert SharedGPUs().slowdowns([whole("a"), patient, whole("b")])[1] == pytest.approx(
        (2 * rest_s + 90e-6) / patient.layer_s
    )
    assert SharedGPUs().slowdowns([patient]) == [1.0], "nobody decodes beside it"
