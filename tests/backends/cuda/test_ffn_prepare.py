"""Which passes a weights rank makes before a model is ready, for whatever will run them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from crosspool.backends.cuda.steps.passes import BUCKETS
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNPassKind, FFNWay
from crosspool.backends.cuda.weights_rank.ffn_prepare import prepare_passes

pytestmark = pytest.mark.judge


class Rank:
    def __init__(self):
        self.passes, self.loops, self.served = [], [], []
        self.num_told = 0
        self.num_held = None  # passes until the channels are closed

    def find(self, way, kind):
        self.passes.append(kind)

    def holds(self, links):
        return self.num_held is None or len(self.passes) < self.num_held

    def prepare_loop(self, name, links, kind):
        assert kind in self.passes, "the pass comes before its loop"
        self.loops.append(kind)

    def prepare(self, way, rows):
        self.served += [(way.model_name, way.lane_number, way.links, count, way.model.takes_choices) for count in rows]

    def tell(self):
        self.num_told += 1

    def prepared(self, *, is_resident=False, may_fuse=False, may_run=False):
        model = SimpleNamespace(layers=("layer",), takes_choices=True)
        way = FFNWay("m", model, 1, self, ("link",))
        prepare_passes(self, self if is_resident else None, way, self.tell, may_fuse=may_fuse, may_run=may_run)
        assert self.num_told == len(self.passes), "a load can be given up after each"
        return self


@pytest.mark.parametrize("may_fuse", [False, True])
def test_every_pass_is_ready_before_the_first_step(may_fuse):
    rank = Rank().prepared(may_fuse=may_fuse)
    assert set(rank.passes) == {FFNPassKind(bucket, fused) for bucket in BUCKETS for fused in {False, may_fuse}}
    assert rank.loops == rank.served == []


def test_a_lane_that_takes_runs_has_their_loops_of_passes_that_are_not_fused():
    rank = Rank().prepared(may_fuse=True, may_run=True)
    assert rank.loops == [FFNPassKind(bucket, False) for bucket in BUCKETS]


def test_channels_that_are_closed_meanwhile_are_left_to_first_steps():
    rank = Rank()
    rank.num_held = 3
    rank.prepared(is_resident=True, may_run=True)
    assert (len(rank.passes), len(rank.loops), rank.served) == (3, 3, [])


def test_a_resident_server_has_the_layers_of_every_pass():
    rank = Rank().prepared(is_resident=True)
    assert rank.served == [("m", 1, ("link",), bucket, True) for bucket in BUCKETS]
    assert len(rank.passes) == len(BUCKETS), "launched where it cannot serve"
