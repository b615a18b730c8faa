"""Which steps a KV rank hands over while the one before is under way, and what their rows are. No device is here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.kv_rank.kv_ahead import KVAhead  # noqa: E402
from crosspool.backends.cuda.kv_rank.kv_pass import KVPass  # noqa: E402
from crosspool.backends.cuda.steps.batch import Batch  # noqa: E402
from crosspool.backends.sequences.sequence import Sequence  # noqa: E402
from crosspool.core import SampledToken, SamplingParams  # noqa: E402
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow  # noqa: E402

pytestmark = pytest.mark.judge

PAGE_TOKENS = 16
GREEDY = SamplingParams(max_tokens=90, temperature=0.0)
HOSTED = SamplingParams(max_tokens=90, temperature=0.0, presence_penalty=0.5)


def sequence(number, sampling=GREEDY):
    new = NewSequence(sequence_id=number, prompt_token_ids=(1, 2, 3), output_token_ids=(7,), sampling=sampling)
    found = Sequence(new, "m", 1, 200)
    found.commit(row(number, 2, new_pages=((number + 1,),)), np.array([[number + 1]]), None)
    return found


def row(number, num_cached, **options):
    return StepRow(sequence_id=number, token_ids=None, num_cached_tokens=num_cached, num_new_tokens=1, **options)


def step(rows, step_seq, num_steps=1, **options):
    header = StepHeader(
        lane=0, model="m", step_seq=step_seq, phase="decode", num_tokens=len(rows), num_steps=num_steps, **options
    )
    return StepDescriptor(header=header, rows=tuple(rows))


class Rank:
    """A KV rank at the step of sequences 0 and 1, of whose lane the test says what it has."""

    def __init__(self, sampling=(GREEDY,) * 3):
        self.sequences = {number: sequence(number, params) for number, params in enumerate(sampling)}
        self.source = object.__new__(KVPass)
        self.source.rows = SimpleNamespace(are_set=lambda tables: self.tables_are_set)
        self.tables_are_set = True
        self.is_in_loop = []
        self.memory = SimpleNamespace(nears_end=True)
        model = SimpleNamespace(split="one", geometry=SimpleNamespace(page_tokens=PAGE_TOKENS))
        self.lane = SimpleNamespace(memory=self.memory, captured=self.captured)
        self.ahead = KVAhead("kv0", SimpleNamespace(led=lambda name: model), {0: self.lane}, self.sequences)
        self.present = Batch(step([row(0, 3), row(1, 3)], 1), self.sequences, PAGE_TOKENS)
        self.ahead.begins(0, self.present, is_run=True)

    def captured(self, model, kind, *, in_loop):
        self.is_in_loop.append(in_loop)
        return self.source


def test_rows_of_a_step_behind_take_the_tokens_that_the_device_draws():
    rank = Rank()
    behind = step([row(1, 4), row(0, 4)], 2)
    assert rank.ahead.is_fit(behind)
    batch = rank.ahead.take(behind)
    assert batch.token_ids == [-2, -1]
    assert batch.positions == [4, 4]
    assert batch.follows == 0b11
    assert rank.ahead.take(behind) is None


def test_a_row_that_joins_has_its_token_already():
    rank = Rank()
    behind = step([row(0, 4), row(2, 3)], 2)
    assert rank.ahead.is_fit(behind)
    batch = rank.ahead.take(behind)
    assert batch.token_ids == [-1, 7]
    assert batch.follows == 0, "the step has something to do whatever ends before"


def test_pages_of_the_step_before_are_known_behind_it():
    rank = Rank()
    present = Batch(step([row(0, 3, first_new_page=1, new_pages=((9,),))], 1), rank.sequences, PAGE_TOKENS)
    behind = Batch(step([row(0, 16)], 2), rank.sequences, PAGE_TOKENS, present)
    assert behind.tables[0] is present.tables[0]
    with pytest.raises(ValueError, match="send its new pages with the row"):
        Batch(step([row(0, 16)], 2), rank.sequences, PAGE_TOKENS)


def test_what_was_handed_over_ahead_is_committed_in_order():
    rank = Rank()
    behind = step([row(0, 4), row(1, 4)], 2)
    rank.ahead.is_fit(behind)
    batch = rank.ahead.take(behind)
    rank.present.commit({0: SampledToken(0, 50), 1: SampledToken(1, 51)})
    batch.commit({0: SampledToken(0, 60), 1: SampledToken(1, 61)})
    assert rank.sequences[0].token_ids == [1, 2, 3, 7, 50, 60]


def test_a_step_behind_one_that_is_no_run_always_begins():
    """Only in a run does the device see which rows end."""
    rank = Rank()
    rank.ahead.begins(0, rank.present, is_run=False)
    behind = step([row(0, 4)], 2, 4)
    rank.ahead.is_fit(behind)
    assert rank.ahead.take(behind).follows == 0


def test_a_step_that_became_fit_is_handed_over_and_no_other():
    rank = Rank()
    rank.ahead.is_fit(step([row(0, 4)], 2))
    assert rank.ahead.take(step([row(0, 4)], 3)) is None


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_run_needs_its_loop(num_steps):
    rank = Rank()
    assert rank.ahead.is_fit(step([row(0, 4)], 2, num_steps))
    assert rank.is_in_loop == [num_steps > 1]


@pytest.mark.parametrize(
    "why",
    ["far from its end", "idle", "ended", "other home", "joining", "unknown", "not captured", "tables", "host samples"],
)
def test_a_step_waits_where_the_host_would_have_to(why):
    rank = Rank(sampling=(GREEDY, GREEDY, HOSTED)) if why == "host samples" else Rank()
    behind = step([row(0, 4), row(2, 3)], 2)
    if why == "far from its end":
        rank.memory.nears_end = False
    elif why == "idle":
        rank.ahead = KVAhead("kv0", rank.ahead._models, {0: rank.lane}, rank.sequences)
    elif why == "ended":
        rank.ahead.ended(0, rank.present)
    elif why == "other home":
        behind = step([row(0, 4)], 2, kv_rank="kv1")
    elif why == "joining":
        new = NewSequence(sequence_id=9, prompt_token_ids=(1,), output_token_ids=(), sampling=GREEDY)
        behind = replace(behind, joining=(new,))
    elif why == "unknown":
        behind = step([row(9, 4)], 2)
    elif why == "not captured":
        rank.source = None
    elif why == "tables":
        rank.tables_are_set = False
    assert not rank.ahead.is_fit(behind)
    assert rank.ahead.take(behind) is None


def test_a_step_that_ended_says_nothing_of_a_newer_one():
    rank = Rank()
    newer = Batch(step([row(0, 4)], 2), rank.sequences, PAGE_TOKENS, rank.present)
    rank.ahead.begins(0, newer, is_run=True)
    rank.ahead.ended(0, rank.present)
    assert rank.ahead.is_fit(step([row(0, 5)], 3))


def test_the_device_draws_all_rows_only_of_decode_steps_that_sample():
    rank = Rank()
    assert rank.present.is_all_drawn
    assert not Batch(step([row(0, 3), row(1, 3, sample=False)], 1), rank.sequences, PAGE_TOKENS).is_all_drawn
