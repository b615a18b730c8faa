"""Passes that were given up: until the device has ended them their pages are not free."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from crosspool.backends.cuda.steps.given_up import GivenUp

pytestmark = pytest.mark.judge


def lane(last_epoch):
    return SimpleNamespace(last_epoch=last_epoch, done_epoch=0, is_drained=False)


def step(*, brings):
    return SimpleNamespace(rows=[SimpleNamespace(new_pages=((1,),) if brings else ())])


def give_up(passes, own):
    passes.note(own)


def test_nobody_is_waited_for_where_no_step_was_given_up():
    passes = GivenUp()
    assert passes.before(step(brings=True)) is None


def test_only_a_step_that_brings_pages_waits():
    passes = GivenUp()
    give_up(passes, lane(10))
    assert passes.before(step(brings=False)) is None
    assert not passes.before(step(brings=True)).satisfied()


def test_passes_have_ended_with_their_own_epoch_though_their_lane_goes_on():
    passes, own, other = GivenUp(), lane(10), lane(20)
    give_up(passes, own)
    give_up(passes, other)
    wait = passes.before(step(brings=True))
    own.last_epoch = 30
    own.done_epoch = 10
    assert not wait.satisfied()
    other.is_drained = True
    assert wait.satisfied()
    assert passes.before(step(brings=True)) is None
