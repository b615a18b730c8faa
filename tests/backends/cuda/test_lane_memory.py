"""A lane's words: giving up passes, and those behind them."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.link import DeviceInlet  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import ABORT, DONE, LaneMemory, WaitRule  # noqa: E402
from crosspool.backends.cuda.steps.records import RING_SLOTS, RUN_AT, STOP_IDS, RunPlace, RunRows  # noqa: E402

pytestmark = pytest.mark.judge

LAYERS = 5


@pytest.fixture
def memory():
    """Two steps of one pass each: of epochs 1,025 to 1,029, and 2,049 to 2,053."""
    made = LaneMemory(torch.device("cpu"), WaitRule())
    for base in (1024, 2048):
        made.push(base, LAYERS)
    return made


class FailingLane:
    """Its device gives a wait up, and ends the pass, between any two looks of the host."""

    device = SimpleNamespace(type="cuda")

    def __init__(self):
        self._done = self._late = 0

    def _look(self, name):
        found = getattr(self, name)
        self._done, self._late = 1029, 1027
        return found

    @property
    def done_epoch(self):
        return self._look("_done")

    def late_epoch(self, peer):
        return self._look("_late")


def test_a_step_has_not_arrived_that_failed_while_its_host_looked():
    inlet = DeviceInlet(FailingLane(), None)
    assert [inlet.arrived(1029) for _ in range(3)] == [False] * 3


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


@pytest.mark.parametrize("may_be_first", [False, True])
@pytest.mark.parametrize("before", [0, 60])
def test_passes_of_a_run_are_posted_as_one_by_one(before, may_be_first):
    """Round the ring's end too."""
    together, apart = (LaneMemory(torch.device("cpu"), WaitRule()) for _ in range(2))
    for memory in (together, apart):
        for number in range(before):
            memory.post(number * 5, 5, 1 << 40)
    places = [RunPlace(9999, step, 7 - step, may_be_first=may_be_first) for step in range(8)]
    for step, place in enumerate(places):
        apart.post(1024 + 5 * step, 5, 3 << 40, place)
    together.post(1024, 5, 3 << 40, places[0], 8)
    assert torch.equal(together.records.memory, apart.records.memory)
    assert torch.equal(together._host, apart._host)
    assert together.last_epoch == apart.last_epoch == 1024 + 40
    records = [together.records.memory[(before + step) % RING_SLOTS] for step in range(8)]
    assert [int(record.view(torch.int64)[0]) for record in records] == [1024 + 5 * step for step in range(8)]
    assert [record[RUN_AT + 2 : RUN_AT + 4].tolist() for record in records] == [[7 - step, step] for step in range(8)]
    over = [int(together.records.memory.view(torch.int64)[(before + step) % RING_SLOTS, 3]) for step in range(8)]
    assert over == [9999 if step or may_be_first else 0 for step in range(8)]


def test_the_end_of_a_run_is_known_of_the_last_one_alone():
    memory = LaneMemory(torch.device("cpu"), WaitRule())
    assert memory.end_of(0) is None
    memory.note_end(2000, 5.5)
    assert (memory.end_of(2000), memory.end_of(1999)) == (5.5, None)


def test_a_record_that_cannot_be_written_leaves_the_lane_as_it_was():
    memory = LaneMemory(torch.device("cpu"), WaitRule())
    for token_ids in ([1, 2, 3], [1, 1 << 31]):
        with pytest.raises(struct.error):
            memory.push(1024, LAYERS, 2, token_ids, [5, 6])
    rows = RunRows(2, [1], [5], None, [8, 8, 8], np.full((1, STOP_IDS), -1, dtype=np.int32))
    with pytest.raises(ValueError, match="broadcast"):
        memory.push_run(1024, LAYERS, 4096, rows)
    assert memory.is_drained
    assert memory.push(1024, LAYERS, 2, [1, 2], [5, 6]) == 0
    assert not memory.is_drained
