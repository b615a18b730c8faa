"""A run's tokens as its host reads them behind the device, which is a script here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.kernels.sampling import fill_sampling, sampling_records  # noqa: E402
from crosspool.backends.cuda.steps.batch import Batch  # noqa: E402
from crosspool.backends.cuda.steps.decode_run import places, push_run, read_end, read_run  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import DONE, LaneMemory, WaitRule  # noqa: E402
from crosspool.backends.cuda.steps.passes import PASS_TOKENS  # noqa: E402
from crosspool.backends.sequences.sequence import Sequence  # noqa: E402
from crosspool.core import SampledToken, SamplingParams  # noqa: E402
from crosspool.scheduler.step import (  # noqa: E402
    NewSequence,
    StepDescriptor,
    StepHeader,
    StepRow,
    epoch,
    run_over,
)

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")
LAYERS, STEPS, PAGE_TOKENS, SEQ = 5, 8, 16, 7
GREEDY = SamplingParams(max_tokens=90, temperature=0.0, stop_token_ids=(99,))
DRAWN = SamplingParams(max_tokens=90, temperature=0.7, top_p=0.9, seed=3)


class Lane:
    """A lane with a run of two rows; `ends(n)` lets the device end its first n steps."""

    def __init__(self, sampling=(GREEDY, GREEDY), step_s=0.0):
        self.memory = LaneMemory(CPU, WaitRule())
        self.pace = self.memory.pace_of("m", len(sampling))
        self.pace.step_s = step_s
        rows, sequences = [], {}
        for number, params in enumerate(sampling):
            new = NewSequence(sequence_id=number, prompt_token_ids=(1, 2, 3), output_token_ids=(4,), sampling=params)
            sequences[number] = Sequence(new, "m", 1, 200)
            row = StepRow(
                sequence_id=number,
                token_ids=None,
                num_cached_tokens=3,
                num_new_tokens=1,
                new_pages=((1,), (2,)),
            )
            rows.append(row)
        header = StepHeader(lane=0, model="m", step_seq=SEQ, phase="decode", num_tokens=len(rows), num_steps=STEPS)
        self.step, self.sequences = StepDescriptor(header=header, rows=tuple(rows)), sequences
        self.batch = Batch(self.step.part(0), sequences, PAGE_TOKENS)
        self.slots = push_run(self.memory, self.batch, header, LAYERS, 4, PAGE_TOKENS)
        self.half = read_run(self.memory, self.batch, self.step, self.slots, LAYERS, ())

    def ends(self, num_steps, tokens=lambda step, row: 10 * step + row):
        for step in range(num_steps):
            for row in range(2):
                self.memory.host_tokens[self.slots[step] * PASS_TOKENS + row] = tokens(step, row)
        self.memory._host[DONE] = epoch(SEQ, num_steps * LAYERS) - 1

    def awaited(self, wait):
        """How many steps the half waits for."""
        return (wait.epoch + 1 - epoch(SEQ, 0)) // LAYERS


def ids(steps):
    return [[token.token_id for token in step] for step in steps]


def test_records_of_a_run_are_those_of_its_steps_pushed_one_by_one():
    lane = Lane((GREEDY, DRAWN))
    by_step = LaneMemory(CPU, WaitRule())
    stops, at = lane.batch.stop_ids(), [0, 1, 0, 0]
    for base, place in places(lane.step.header, LAYERS):
        sampling = sampling_records(4)
        for row in lane.batch.drawn:
            fill_sampling(sampling, row.row, lane.batch.sampling_row(row, place.step))
        whole = type(place)(place.over, place.step, place.left, np.array([2 * PAGE_TOKENS] * 2), stops)
        token_ids = [lane.batch.token_ids[row] if place.step == 0 else -1 - row for row in at]
        positions = [lane.batch.positions[row] + place.step for row in at]
        by_step.push(base, LAYERS, 4, token_ids, positions, sampling, whole)
    assert torch.equal(lane.memory.records.memory, by_step.records.memory)
    assert lane.slots == list(range(STEPS))
    assert not lane.memory.is_drained
    lane.memory._host[DONE] = epoch(SEQ, STEPS * LAYERS) - 1
    assert lane.memory.is_drained


def test_records_of_runs_go_round_the_ring():
    lane = Lane()
    header = lane.step.header
    for _ in range(7):
        slots = push_run(lane.memory, lane.batch, header, LAYERS, 4, PAGE_TOKENS)
    assert slots == list(range(56, 64))
    assert push_run(lane.memory, lane.batch, header, LAYERS, 4, PAGE_TOKENS) == list(range(8))


def test_steps_that_nobody_has_timed_are_told_one_by_one():
    lane = Lane()
    wait = next(lane.half)
    assert (lane.awaited(wait), wait.told) == (1, ())


def test_steps_are_told_together_as_far_as_the_device_has_come():
    lane = Lane(step_s=6.9e-3)
    wait = next(lane.half)
    assert lane.awaited(wait) == 2
    lane.ends(3)
    wait = next(lane.half)
    assert ids(wait.told) == [[0, 1], [10, 11], [20, 21]]
    assert lane.sequences[1].token_ids == [1, 2, 3, 4, 1, 11, 21]
    assert lane.awaited(wait) > 3


def test_tokens_of_a_step_that_has_failed_since_the_look_are_not_told():
    """Its device has ended the run by then, with whatever it sampled."""
    lane = Lane(step_s=6.9e-3)
    peer = SimpleNamespace(arrived=lambda epoch: True)
    half = read_run(lane.memory, lane.batch, lane.step, lane.slots, LAYERS, (peer,))
    assert lane.awaited(next(half)) == 2
    lane.ends(4)
    peer.arrived = lambda epoch: False
    assert ids(next(half).told) == [[0, 1], [10, 11]]
    assert lane.sequences[1].token_ids == [1, 2, 3, 4, 1, 11]


def test_every_token_is_told_once_and_the_last_ones_are_the_result():
    lane = Lane(step_s=1e-3)
    assert lane.awaited(next(lane.half)) == STEPS, "a run that is over soon is read once"
    lane.ends(STEPS)
    told = ids(next(lane.half).told)
    with pytest.raises(StopIteration) as end:
        next(lane.half)
    assert [*told, *ids([end.value.value])] == [[10 * step, 10 * step + 1] for step in range(STEPS)]
    assert end.value.value[0] == SampledToken(0, 70)


def test_a_run_that_the_device_ended_early_is_read_up_to_there():
    """What lies behind, of an older run, is nobody's."""
    lane = Lane(step_s=1e-3)
    next(lane.half)
    lane.ends(4, lambda step, row: 99 if step == row + 1 else 5)
    lane.memory.host_tokens[lane.slots[3] * PASS_TOKENS] = -1
    lane.memory._host[DONE] = run_over(SEQ, STEPS, LAYERS)
    assert ids(next(lane.half).told) == [[5, 5], [99, 5]]
    with pytest.raises(StopIteration) as end:
        next(lane.half)
    assert ids([end.value.value]) == [[5, 99]]
    assert lane.pace.step_s == 1e-3, "an early end says nothing of how long steps take"


def test_a_run_that_the_device_ended_for_lack_of_pages_says_so():
    lane = Lane(step_s=1e-3)
    next(lane.half)
    lane.ends(2)
    lane.memory.host_tokens[lane.slots[2] * PASS_TOKENS] = -1
    lane.memory._host[DONE] = run_over(SEQ, STEPS, LAYERS)
    with pytest.raises(ValueError, match="after 2 of 8 steps: a row lacks a page"):
        next(lane.half)


def test_a_rank_without_rows_looks_half_way_and_at_the_end():
    lane = Lane()
    lane.pace.step_s = 2e-3
    half = read_end(lane.memory, lane.step.header, LAYERS, None)
    first = next(half)
    assert lane.awaited(first) == STEPS // 2
    lane.ends(STEPS // 2)
    second = next(half)
    assert lane.awaited(second) == STEPS
    lane.ends(STEPS)
    assert next(half, None) is None


class FollowingRuns:
    """A weights rank's runs, one behind another on the device, whose step takes `step_s` on a clock of the test."""

    def __init__(self, monkeypatch, step_s):
        self.now_s, self.step_s, self.begun_s = 100.0, step_s, 100.0
        self.memory = LaneMemory(CPU, WaitRule())
        self.pace = self.memory.pace_of("m", 1)
        self.pace._clock = lambda: self.now_s
        self.pace.step_s = step_s
        monkeypatch.setattr("crosspool.backends.cuda.steps.decode_run.time.monotonic", lambda: self.now_s)
        self.seq = 0

    def header(self, step_seq):
        return StepHeader(lane=0, model="m", step_seq=step_seq, phase="decode", num_tokens=1, num_steps=STEPS)

    def post(self):
        """The next run is handed to the device; the half that waits for it, and what it follows there."""
        self.seq += 1
        follows = self.memory.last_epoch
        self.memory.post(epoch(self.seq, 0) - 1, LAYERS, 1 << 40, num_steps=STEPS)
        return read_end(self.memory, self.header(self.seq), LAYERS, None, follows)

    def advance(self, seconds):
        self.now_s += seconds
        steps = int((self.now_s - self.begun_s) / self.step_s + 1e-9)
        run, step = divmod(steps, STEPS)
        self.memory._host[DONE] = epoch(1 + run, step * LAYERS) - 1 if step else epoch(run, STEPS * LAYERS) - 1


def test_a_rank_without_rows_looks_once_a_run_where_the_next_one_follows(monkeypatch):
    """Half-way through a run it finds the end of the one before, and may hand over the next."""
    runs = FollowingRuns(monkeypatch, 2e-3)
    half, num_looks = runs.post(), 0
    wait = next(half)
    for _ in range(20):
        while not runs.memory.nears_end:
            runs.advance(wait.rest(runs.now_s))
            num_looks += 1
            if runs.memory.done_epoch >= wait.epoch:
                wait = next(half)
        behind = runs.post()
        runs.advance(wait.rest(runs.now_s))
        num_looks += 1
        assert runs.memory.done_epoch > wait.epoch, "the run has ended, and the next one is half-way"
        assert next(half, None) is None
        half, runs.memory.nears_end = behind, False
        wait = next(half)
    assert num_looks <= 22
    assert runs.memory.nears_end, "which was seen without another look"


def test_a_rank_without_rows_looks_at_the_end_of_a_run_that_none_follows(monkeypatch):
    runs = FollowingRuns(monkeypatch, 2e-3)
    half = runs.post()
    runs.advance(next(half).rest(runs.now_s))
    wait = next(half)
    left_s = 100.0 + STEPS * 2e-3 - runs.now_s
    assert wait.rest(runs.now_s) == pytest.approx(left_s, abs=4e-4)
    runs.post()
    assert wait.rest(runs.now_s) > left_s + STEPS * 2e-3 / 2, "one was handed over since"


def test_a_device_in_the_middle_of_a_run_tells_when_that_has_begun_at_the_latest(monkeypatch):
    runs = FollowingRuns(monkeypatch, 2e-3)
    runs.post()
    first = runs.memory.last_epoch
    half = runs.post()
    runs.advance((STEPS + 1.5) * 2e-3)
    runs.memory.note_end(first, runs.now_s)  # thought to have ended just now
    next(half)
    assert runs.pace._begun_s + runs.pace.step_s <= runs.now_s + 1e-9
