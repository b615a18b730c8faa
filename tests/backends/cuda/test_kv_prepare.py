"""Which passes a KV rank captures before a model is ready."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from crosspool.backends.cuda.kv_prepare import kinds_ahead
from crosspool.backends.cuda.passes import BUCKETS

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
