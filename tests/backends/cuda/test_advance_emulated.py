"""What decides on the device whether a run goes on: stop tokens, slots, rows that come and rows that do not."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.cuda.channels.transport import begin_pass, end_pass  # noqa: E402
from crosspool.backends.cuda.kernels.advance import advance, release  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule  # noqa: E402
from crosspool.backends.cuda.steps.records import STOP_IDS, RunPlace, RunRows  # noqa: E402
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


class Follower(KVLane):
    """The same run, and one behind it of the rows that `follows` names as bits."""

    def __init__(self, follows: int, *, is_over: bool = False) -> None:
        super().__init__()
        ids, at = np.array([-1, -2, -1, -1]), np.array([14, 24, 14, 14])
        stops = np.full((2, STOP_IDS), -1, dtype=np.int32)
        rows = RunRows(STEPS, ids, at, None, [100, 100], stops, follows, is_over)
        self.next_base = FIRST + 1024
        self.next_over = self.next_base + STEPS * LAYERS + 1
        self.next_slots = self.lane.push_run(self.next_base, LAYERS, self.next_over, rows)

    def begins(self) -> bool:
        """Whether the run behind begins."""
        drawn, before = torch.zeros(4, dtype=torch.int32), int(self.lane.words[2])
        flags = [ctypes.addressof(self.flag)]
        advance(self.kernels, self.lane, LAYERS, flags, rows=4, tokens=drawn, is_first=True)
        return int(self.lane.words[2]) == before


def test_a_run_whose_rows_all_ended_in_the_run_before_does_not_begin():
    """Nobody waits for it: its records are skipped, its host and its peers are told."""
    run = Follower(0b11)
    assert run.step(9, 4)
    assert not run.step(3, 12)
    assert not run.begins()
    assert int(run.lane.words[2]) == 2 * STEPS
    assert run.flag.value == run.next_over
    assert run.lane.is_drained
    assert [run.lane.tokens(slot, 1) for slot in run.next_slots] == [[-1]] * STEPS


@pytest.mark.parametrize(("follows", "begins"), [(0b11, False), (0b01, False), (0b10, True), (0b00, True)], ids=bin)
def test_a_run_begins_unless_all_its_rows_ended_with_the_last_step_before(follows, begins):
    """The first row draws its stop token in the last step, the second goes on; without bits other rows have joined."""
    run = Follower(follows)
    for _ in range(STEPS - 1):
        assert run.step(3, 12 if follows == 0b11 else 4)
    run.step(9, 4)
    assert run.flag.value == FIRST, "the run ended with its last step"
    assert run.begins() is begins
    assert (run.flag.value, run.lane.is_drained) == ((FIRST, False) if begins else (run.next_over, True))


def test_a_run_behind_one_that_failed_does_not_begin():
    run = Follower(0b11)
    assert run.step(3, 4)
    run.lane.words[1] = FIRST + 2 * LAYERS - 1
    assert not run.step(3, 4)
    assert run.flag.value == OVER
    assert not run.begins()
    assert run.flag.value == run.next_over


def test_a_run_that_the_host_knows_to_be_over_does_not_begin():
    run = Follower(0, is_over=True)
    for _ in range(STEPS):
        run.step(3, 4)
    assert not run.begins()


@pytest.mark.parametrize(("flag", "begins"), [(FIRST + 1, True), (OVER, False), (OVER + 1024, False)])
def test_a_weights_rank_begins_a_run_when_its_first_rows_come(flag, begins):
    kernels, lane, rows = EmulatedKernels(), LaneMemory(CPU, WaitRule()), ctypes.c_uint64(flag)
    for step in range(STEPS):
        lane.push(FIRST + step * LAYERS, LAYERS, place=RunPlace(OVER, step, STEPS - 1 - step))
    advance(kernels, lane, LAYERS, [ctypes.addressof(rows)], is_first=True)
    assert lane.is_drained is not begins
    assert int(lane.words[2]) == (0 if begins else STEPS)
