"""Which passes a KV rank captures before a model is ready."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from crosspool.backends.cuda.kv_rank.kv_prepare import kinds_ahead, prepare_passes
from crosspool.backends.cuda.steps.passes import BUCKETS

pytestmark = pytest.mark.judge

DEVICES = {"kv0": 0, "w0": 1, "w1": 0}


def kinds(weights_ranks):
    return kinds_ahead(SimpleNamespace(index=0, devices=DEVICES), weights_ranks)


def test_every_decode_pass_is_ready_before_the_first_step():
    found = kinds(["w0"])
    assert [kind.bucket for kind in found] == sorted(BUCKETS, reverse=True), "the largest scratch serves all"
    assert all(kind.samples and kind.is_decode for kind in found)


def test_beside_a_weights_rank_no_step_meets_a_pass_that_is_still_to_be_captured():
    found = kinds(["w0", "w1"])
    expected = {(bucket, samples, False) for bucket in BUCKETS for samples in (True, False)}
    expected |= {(bucket, True, True) for bucket in BUCKETS}
    assert {(kind.bucket, kind.samples, kind.is_decode) for kind in found} == expected
    assert len(found) == len(expected)


class Lane:
    """What is captured in it, in order."""

    def __init__(self):
        self.passes, self.loops = [], []
        self.num_held = None  # passes until the channels are closed

    def holds(self, links):
        return self.num_held is None or len(self.passes) < self.num_held

    def prepare_loop(self, name, links, kind):
        assert kind in self.passes, "the pass comes before its loop"
        self.loops.append((name, links, kind))


def prepared(run_lanes, *, split="one", num_held=None):
    lanes = [Lane() for _ in range(3)]
    lanes[0].num_held = num_held
    opened = SimpleNamespace(open_to=lambda ranks: [(idx, lane, ("link",)) for idx, lane in enumerate(lanes)])
    found = SimpleNamespace(find=lambda way, kind: way.lane.passes.append(kind))
    site, model, told = SimpleNamespace(index=0, devices=DEVICES), SimpleNamespace(split=split), []
    prepare_passes(found, site, opened, "m", model, ["w0", "w1"], None, lambda: told.append(1), run_lanes)
    assert len(told) == sum(len(lane.passes) for lane in lanes), "a load can be given up after each"
    return lanes


def test_lanes_that_take_runs_have_their_loops_before_the_first_one():
    lanes = prepared(run_lanes=2)
    for lane in lanes[:2]:
        assert {kind.bucket for _, _, kind in lane.loops} == set(BUCKETS)
        assert all(found[:2] == ("m", ("link",)) and found[2].is_decode and found[2].samples for found in lane.loops)
    assert lanes[2].loops == [], "prompts run in no loop"
    assert lanes[2].passes == lanes[0].passes


def test_without_runs_nothing_is_captured_twice():
    assert all(lane.loops == [] and lane.passes for lane in prepared(run_lanes=0))
    assert all(lane.passes == [] for lane in prepared(run_lanes=2, split="tokens"))


def test_channels_that_are_closed_meanwhile_are_left_to_first_steps():
    first, *others = prepared(run_lanes=0, num_held=2)
    assert len(first.passes) == 2
    assert all(tuple(lane.passes) == kinds(["w0", "w1"]) for lane in others)
