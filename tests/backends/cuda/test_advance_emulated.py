"""What decides on the device whether a run goes on: stop tokens, slots, rows that come and rows that do not."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.cuda.advance import advance, release  # noqa: E402
from crosspool.backends.cuda.lane_memory import STOP_IDS, LaneMemory, RunPlace, WaitRule  # noqa: E402
from crosspool.backends.cuda.transport import begin_pass, end_pass  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]

CPU = torch.device("cpu")
LAYERS, STEPS = 5, 4
FIRST = 7 * 1024
OVER = FIRST + STEPS * LAYERS + 1


class KVLane:
    """A run of two rows on kernels of four; `step` samples the given tokens."""

    def __init__(self, stops=((9, 11), (12,)), limits=(100, 100), positions=(10, 20)) -> None:
        self.kernels, self.lane = EmulatedKernels(), LaneMemory(CPU, WaitRule())
        self.flag = ctypes.c_uint64(FIRST)
        padded = np.array([[*own, *[-1] * (STOP_IDS - len(own))] for own in stops], dtype=np.int32)
        self.slots = []
        for step in range(STEPS):
            place = RunPlace(OVER, step, STEPS - 1 - step, limits, padded)
            at = np.array([*positions, positions[0], positions[0]]) + step
            self.slots.append(self.lane.push(FIRST + step * LAYERS, LAYERS, 4, [1, 2, 1, 1], at, None, place))
        self.inputs = [torch.zeros(4, dtype=torch.int32) for _ in range(3)]

    def step(self, *tokens: int) -> bool:
        """Whether the next step is to begin."""
        drawn = torch.tensor([*tokens, 9, 9], dtype=torch.int32)
        begin_pass(self.kernels, self.lane, *self.inputs)
        end_pass(self.kernels, self.lane, LAYERS, drawn)
        before = int(self.lane.words[2])
        flags = [ctypes.addressof(self.flag)]
        advance(self.kernels, self.lane, LAYERS, flags, rows=4, tokens=drawn)
        return int(self.lane.words[2]) == before and not self.lane.is_drained


def test_a_run_goes_on_to_its_last_step():
    run = KVLane()
    assert [run.step(3, 4) for _ in range(STEPS)] == [True, True, True, False]
    assert run.lane.done_epoch == FIRST + STEPS * LAYERS
    assert run.flag.value == FIRST, "nobody was told of an early end"


def test_a_run_ends_when_the_last_row_has_drawn_one_of_its_stop_tokens():
    """Rows end in steps of their own; the second's stop token means nothing in the first row; padding rows neither."""
    run = KVLane()
    assert run.step(12, 4)
    assert run.step(11, 4)
    assert not run.step(3, 12)
    assert (run.lane.done_epoch, run.flag.value) == (OVER, OVER)
    assert run.lane.is_drained
    assert [run.lane.tokens(slot, 2) for slot in run.slots[:3]] == [[12, 4], [11, 4], [3, 12]]
    assert run.lane.tokens(run.slots[3], 1) == [-1]
    assert int(run.lane.words[2]) == STEPS, "the next pass reads the record behind the run's"


def test_what_ended_in_one_run_does_not_end_the_next():
    run = KVLane()
    assert run.step(9, 4)
    assert not run.step(3, 12)
    again = KVLane()
    run.lane.words[4] = 3
    again.lane.words[4] = 3
    assert again.step(3, 4)


def test_a_run_ends_before_a_row_writes_where_it_has_no_slot():
    run = KVLane(limits=(100, 22))
    assert run.step(3, 4)
    assert not run.step(3, 4)
    assert run.lane.tokens(run.slots[2], 1) == [-1]


def test_a_run_whose_step_failed_ends():
    run = KVLane()
    run.lane.words[1] = FIRST
    assert not run.step(3, 4)


def weights_lane(flag: int, deadline_s: float = 20.0):
    kernels, lane = EmulatedKernels(), LaneMemory(CPU, WaitRule(deadline_s=deadline_s))
    for step in range(STEPS):
        lane.push(FIRST + step * LAYERS, LAYERS, place=RunPlace(OVER, step, STEPS - 1 - step))
    begin_pass(kernels, lane)
    end_pass(kernels, lane, LAYERS)
    word = ctypes.c_uint64(flag)
    advance(kernels, lane, LAYERS, [ctypes.addressof(word)])
    return lane


@pytest.mark.parametrize("flag", [FIRST + LAYERS + 1, OVER - 1])
def test_a_weights_rank_goes_on_when_rows_have_come(flag):
    lane = weights_lane(flag)
    assert (int(lane.words[2]), lane.is_drained) == (1, False)


def test_a_weights_rank_ends_the_run_that_the_kv_rank_has_ended():
    lane = weights_lane(OVER)
    assert (int(lane.words[2]), lane.is_drained, lane.late_epoch(0)) == (STEPS, True, 0)


def test_a_weights_rank_waits_no_longer_than_its_deadline():
    lane = weights_lane(FIRST + LAYERS, deadline_s=0.05)
    assert lane.is_drained
    assert lane.late_epoch(0) == FIRST + LAYERS + 1


def test_release_raises_every_flag():
    flags = [ctypes.c_uint64(1), ctypes.c_uint64(2)]
    release(EmulatedKernels(), [ctypes.addressof(flag) for flag in flags], OVER)
    assert [flag.value for flag in flags] == [OVER, OVER]
