"""Copies of both directions go their own ways, and keep their order where they touch the same frame."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from crosspool.backends.cuda.kv_frames.copy_order import MAX_COPIES, CopyOrder
from crosspool.kv_pool.host_tier import FrameCopy

pytestmark = pytest.mark.judge


def stow(frames, host_frames):
    return FrameCopy(frames, host_frames, is_stowed=True)


def back(frames, host_frames):
    return FrameCopy(frames, host_frames, is_stowed=False)


def an_order(*copies) -> CopyOrder:
    order = CopyOrder()
    for copy in copies:
        order.add(copy)
    return order


def test_a_page_that_is_stowed_does_not_wait_for_those_that_come_back():
    order = an_order(*(back((10 + page,), (10 + page,)) for page in range(100)), stow((1, 2), (1, 2)))
    batch = order.next(is_stowed=True)
    assert batch.copies == [stow((1, 2), (1, 2))]
    assert len(order.next(is_stowed=False).copies) == MAX_COPIES


def test_frames_that_are_filled_again_are_read_first():
    out, into = stow((1, 2), (5, 6)), back((2, 3), (7, 8))
    order = an_order(out, into)
    assert order.next(is_stowed=False) is None
    batch = order.next(is_stowed=True)
    assert batch.copies == [out]
    assert order.next(is_stowed=False) is None, "it is under way"
    order.ended(batch)
    assert order.next(is_stowed=False).copies == [into]


def test_host_frames_are_read_before_others_are_put_there():
    out, into = stow((1, 2), (5, 6)), back((3, 4), (6, 7))
    order = an_order(into, out)
    assert order.next(is_stowed=True) is None
    order.ended(order.next(is_stowed=False))
    assert order.next(is_stowed=True).copies == [out]


def test_two_of_a_direction_that_touch_the_same_frame_follow_each_other():
    order = an_order(back((1,), (5,)), back((2,), (6,)), back((3,), (5,)))
    assert [len(order.next(is_stowed=False).copies) for _ in range(2)] == [2, 1]


def test_batches_never_wait_for_each_other():
    """A copy that comes after a batch of the other direction joins none that this one comes after."""
    order = an_order(stow((1,), (1,)), back((1,), (2,)), stow((3,), (2,)), back((3,), (4,)))
    found = []
    while order.num_unfinished:
        batch = order.next(is_stowed=True) or order.next(is_stowed=False)
        assert batch is not None, "nobody can go on"
        found.append([copy.frames[0] for copy in batch.copies])
        order.ended(batch)
    assert found == [[1], [1], [3], [3]]
