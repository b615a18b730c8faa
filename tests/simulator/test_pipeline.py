"""Lanes between stations: bounds, order, phase-locking, bookkeeping."""

from __future__ import annotations

import random

import pytest

from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.simulator.pipeline import OrderedPipeline, Route, Span, StreamPipeline
from tests.support.simulating import stages

POOLS = Route(kv=0, weights=1)


def per_step_s(pipeline, times, num_lanes, num_steps=60, offset_s=0.0) -> float:
    """Mean time between ends of steps, over all lanes, once the first steps are over."""
    for lane in range(num_lanes):
        pipeline.start(lane, times, POOLS, lane * offset_s)
    ends = []
    while len(ends) < num_steps:
        lane = pipeline.advance(float("inf"))
        ends.append(pipeline.now_s)
        pipeline.start(lane, times, POOLS, pipeline.now_s)
    skipped = 4 * num_lanes
    return (ends[-1] - ends[skipped - 1]) / (num_steps - skipped)


def ordered(num_lanes, policy="ticket", **options) -> OrderedPipeline:
    return OrderedPipeline(2, num_lanes, ORDER_POLICIES[policy], **options)


@pytest.mark.parametrize("pipeline", [ordered(1), StreamPipeline(2, 1)], ids=["ordered", "streams"])
def test_a_lane_alone_takes_its_step_time(pipeline):
    times = stages(tail=150)
    assert per_step_s(pipeline, times, 1) == pytest.approx(times.step_s)


@pytest.mark.parametrize("beside", [8, 40])
@pytest.mark.parametrize("make", [lambda: ordered(1), lambda: StreamPipeline(2, 1)], ids=["ordered", "streams"])
def test_a_layer_goes_on_once_both_parts_of_its_ffn_are_done(make, beside):
    times = stages(20, 25, 3, tail=150, beside=beside)
    assert times.step_s == pytest.approx((48 * (20 + max(25, beside) + 6) + 150) * 1e-6)
    assert per_step_s(make(), times, 1) == pytest.approx(times.step_s)


@pytest.mark.parametrize(("ffn", "beside"), [(60, 20), (40, 30)])
def test_a_part_beside_attention_takes_its_gpus_time(ffn, beside):
    times = stages(20, ffn, 3, beside=beside)
    spans: list[Span] = []
    pipeline = ordered(2, spans=spans)
    each = per_step_s(pipeline, times, 2) / 48
    assert each == pytest.approx(max(20 + beside, ffn) * 1e-6, rel=0.02)
    assert {round(span.duration_s * 1e6) for span in spans if span.station == 0} == {0, 20, beside}


@pytest.mark.parametrize("policy", ["none", "ticket", "priority"])
@pytest.mark.parametrize(("attention", "ffn", "crossing"), [(20, 25, 3), (30, 10, 3), (10, 40, 5), (25, 25, 0.5)])
def test_two_equal_lanes_reach_the_bound(policy, attention, ffn, crossing):
    times = stages(attention, ffn, crossing)
    bound = min(2.0, (attention + ffn + 2 * crossing) / max(attention, ffn))
    gain = times.step_s / per_step_s(ordered(2, policy), times, 2)
    assert gain <= bound * (1 + 1e-9)
    assert gain == pytest.approx(bound, rel=0.01)


def test_the_tail_counts_as_attention_in_the_bound():
    times = stages(24, 20, 3, tail=96, layers=48)
    bound = times.step_s / times.kv_busy_s
    gain = times.step_s / per_step_s(ordered(2), times, 2)
    assert gain <= bound * (1 + 1e-9)
    assert gain == pytest.approx(bound, rel=0.05)


def test_more_lanes_never_beat_the_busier_pool():
    times = stages(20, 25, 3)
    assert per_step_s(ordered(4), times, 4) == pytest.approx(48 * 25e-6, rel=0.02)


def test_streams_without_order_phase_lock():
    times = stages(20, 25, 3)
    locked = per_step_s(StreamPipeline(2, 2), times, 2)
    assert locked == pytest.approx(48 * (2 * 20 + 2 * 25 + 2 * 3) / 2 * 1e-6, rel=1e-6)  # both at one station, always
    assert locked > 1.8 * per_step_s(ordered(2), times, 2)


def test_streams_that_start_apart_stay_apart():
    times = stages(25, 25, 3)
    apart = per_step_s(StreamPipeline(2, 2), times, 2, offset_s=27e-6)
    assert apart < 0.6 * per_step_s(StreamPipeline(2, 2), times, 2)


def test_decode_goes_before_prefill_where_both_wait():
    spans: list[Span] = []
    pipeline = ordered(3, "priority", spans=spans)
    times = stages(layers=1, attention=10)
    pipeline.start(0, times, Route(kv=0, weights=1, priority=1), 0.0)
    pipeline.start(1, times, Route(kv=0, weights=1, priority=1), 1e-6)
    pipeline.start(2, times, Route(kv=0, weights=1, priority=0), 2e-6)
    while pipeline.advance(1.0) is not None:
        pass
    assert [span.lane for span in spans if span.station == 0][:3] == [0, 2, 1]


def test_a_segment_out_of_patience_goes_first():
    spans: list[Span] = []
    pipeline = ordered(3, "priority", spans=spans)
    times = stages(layers=1, attention=10)
    pipeline.start(0, times, Route(kv=0, weights=1, priority=1, patience_s=5e-6), 0.0)
    pipeline.start(1, times, Route(kv=0, weights=1, priority=1, patience_s=5e-6), 1e-6)
    pipeline.start(2, times, Route(kv=0, weights=1, priority=0), 8e-6)
    while pipeline.advance(1.0) is not None:
        pass
    assert [span.lane for span in spans if span.station == 0][:3] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", ["none", "ticket", "priority"])
def test_random_lanes_keep_the_rules(seed, policy):
    rng = random.Random(seed)
    num_lanes, num_stations = rng.randint(1, 5), 4
    spans: list[Span] = []
    pipeline = OrderedPipeline(num_stations, num_lanes, ORDER_POLICIES[policy], spans=spans)
    lanes, started = {}, {}
    for lane in range(num_lanes):
        times = stages(
            rng.uniform(1, 50), rng.uniform(1, 50), rng.uniform(0.1, 8), rng.uniform(0.1, 90), rng.randint(1, 9)
        )
        route = Route(kv=rng.randrange(2), weights=2 + rng.randrange(2), priority=rng.randrange(2))
        lanes[lane] = (times, route)
        started[lane] = [rng.uniform(0, 1e-4)]
        pipeline.start(lane, times, route, started[lane][0])
    ended: dict[int, list[float]] = {lane: [] for lane in lanes}
    for _ in range(40):
        lane = pipeline.advance(float("inf"))
        ended[lane].append(pipeline.now_s)
        if len(ended[lane]) < 8:
            started[lane].append(pipeline.now_s)
            pipeline.start(lane, *lanes[lane], pipeline.now_s)
        if all(len(times) == 8 for times in ended.values()):
            break
    for station in range(num_stations):
        mine = sorted((span.start_s, span.duration_s) for span in spans if span.station == station)
        for (start, duration), (following, _) in zip(mine, mine[1:]):  # noqa: B905, RUF007
            assert following >= start + duration - 1e-12, "two segments at once"
        assert pipeline.busy_s[station] == pytest.approx(sum(duration for _, duration in mine))
    for lane, (times, route) in lanes.items():
        own = [span for span in spans if span.lane == lane]
        per_step = 2 * times.num_layers + 1
        for number, end_s in enumerate(ended[lane]):
            step = own[number * per_step : (number + 1) * per_step]
            assert [span.station for span in step] == [route.kv, route.weights] * times.num_layers + [route.kv]
            assert step[0].start_s >= started[lane][number]
            assert step[-1].start_s + step[-1].duration_s == pytest.approx(end_s)
            for before, after in zip(step, step[1:]):  # noqa: B905, RUF007
                assert after.start_s >= before.start_s + before.duration_s + times.crossing_s - 1e-12
            assert end_s - started[lane][number] >= times.step_s - 1e-12


def test_four_events_a_layer_and_two_for_the_tail():
    pipeline = ordered(1)
    pipeline.start(0, stages(layers=7), POOLS, 0.0)
    pipeline.advance(1.0)
    assert pipeline.num_events == 4 * 7 + 2


@pytest.mark.parametrize("make", [lambda: ordered(1), lambda: StreamPipeline(2, 1)], ids=["ordered", "streams"])
def test_a_step_can_go_on_where_another_pipeline_left_it(make):
    times, pipeline = stages(layers=40, tail=10), make()
    pipeline.start(0, times, POOLS, 0.0)
    assert pipeline.advance(0.6 * times.step_s) is None
    done = pipeline.progress(0)
    assert done == pytest.approx(0.6, abs=0.03)
    other = make()
    other.start(0, times, POOLS, 1.0, done)
    assert other.advance(2.0) == 0
    assert other.now_s - 1.0 == pytest.approx(0.4 * times.step_s, rel=0.06)


def test_time_stops_where_it_is_told_to():
    for pipeline in (ordered(1), StreamPipeline(2, 1)):
        pipeline.start(0, stages(layers=2, tail=5), POOLS, 0.0)
        assert pipeline.advance(30e-6) is None
        assert pipeline.now_s == pytest.approx(30e-6)
        assert pipeline.advance(1.0) == 0
        assert pipeline.now_s == pytest.approx(stages(layers=2, tail=5).step_s)
