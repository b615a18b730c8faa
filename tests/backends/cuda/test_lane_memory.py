"""A lane's words: giving up passes, and those behind them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.lane_memory import ABORT, DONE, LaneMemory, WaitRule  # noqa: E402

pytestmark = pytest.mark.judge

LAYERS = 5


@pytest.fixture
def memory():
    """Two steps of one pass each: of epochs 1,025 to 1,029, and 2,049 to 2,053."""
    made = LaneMemory(torch.device("cpu"), WaitRule())
    for base in (1024, 2048):
        made.push(base, LAYERS)
    return made


def test_a_step_that_is_given_up_behind_another_leaves_that_alone(memory):
    memory.abort(2053, behind=1029)
    assert int(memory._host[ABORT]) == 0
    assert not memory.is_drained
    memory._host[DONE] = 1029
    assert not memory.is_drained
    assert int(memory._host[ABORT]) == 2053, "it goes on no more once the one before has ended"


def test_a_step_that_is_given_up_behind_one_that_is_given_up_too_ends_at_once(memory):
    memory.abort(1029)
    assert int(memory._host[ABORT]) == 1029
    memory.abort(2053, behind=1029)
    assert int(memory._host[ABORT]) == 2053


def test_giving_up_the_step_before_later_ends_what_was_left_behind_it(memory):
    memory.abort(2053, behind=1029)
    memory.abort(1029)
    assert int(memory._host[ABORT]) == 2053


def test_a_step_that_is_given_up_alone_is_so_at_once(memory):
    memory._host[DONE] = 1029
    memory.abort(2053)
    assert int(memory._host[ABORT]) == 2053
