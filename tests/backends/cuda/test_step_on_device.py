"""A step that is left before its end is given up on its device, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from crosspool.backends.base import Wait
from crosspool.backends.cuda.steps.step_on_device import StepOnDevice

pytestmark = pytest.mark.judge

BEFORE, LAST = 1030, 2054
"""Last epochs of the lane's step before, and of the step."""


class Lane:
    def __init__(self) -> None:
        self.memory = SimpleNamespace(last_epoch=BEFORE)
        self.given_up: list[tuple[int, int]] = []

    def give_up(self, last_epoch: int, behind: int = 0) -> None:
        self.given_up.append((last_epoch, behind))


def half(lane, *, is_ahead=False):
    with StepOnDevice(lane, LAST, is_ahead=is_ahead) as on_device:
        lane.memory.last_epoch = LAST  # its passes are pushed
        yield on_device.follows
        if is_ahead:
            yield from on_device.await_turn()
        yield Wait((), LAST)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_step_that_ends_is_not_given_up(is_ahead):
    lane = Lane()
    follows, *_ = half(lane, is_ahead=is_ahead)
    assert follows == (BEFORE if is_ahead else 0)
    assert lane.given_up == []


def test_a_step_that_raises_is_given_up_and_the_error_goes_on():
    lane = Lane()
    step = half(lane)
    next(step)
    with pytest.raises(ValueError, match="a bug"):
        step.throw(ValueError("a bug"))
    assert lane.given_up == [(LAST, 0)]


@pytest.mark.parametrize(("num_waits", "behind"), [(1, BEFORE), (2, BEFORE), (3, 0)])
def test_a_step_ahead_that_is_closed_spares_the_one_before_until_that_has_ended(num_waits, behind):
    lane = Lane()
    step = half(lane, is_ahead=True)
    for _ in range(num_waits):
        next(step)
    step.close()
    assert lane.given_up == [(LAST, behind)]
