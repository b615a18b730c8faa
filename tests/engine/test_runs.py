"""Runs, several decode steps in one descriptor: what they hold, when there are none, and that tokens stay the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.core import FinishReason
from tests.support.any_token import AnyToken
from tests.support.core_drive import Drive, a_config, a_model
from tests.support.scripted_tokens import token_at

STEP_S = 0.01


def drive_of(*models: str, num_frames: int = 256, is_ahead: bool = False, **options) -> Drive:
    drive = Drive(a_config(num_frames, decode_steps=4, **options), [*map(a_model, models)], is_ahead=is_ahead)
    drive.cluster.durations = dict.fromkeys(models, STEP_S)
    return drive


def runs_of(drive: Drive) -> list[int]:
    return [step.num_steps for step in drive.cluster.steps if step.header.phase == "decode"]


@pytest.mark.parametrize(("max_tokens", "runs"), [(1, []), (2, [1]), (5, [4]), (8, [4, 3]), (11, [4, 4, 2])])
def test_a_run_is_as_long_as_allowed_and_gives_no_token_beyond_the_last(max_tokens, runs):
    drive = drive_of("p")
    drive.add("p", prompt=3, max_tokens=max_tokens)
    drive.run()
    assert runs_of(drive) == runs
    drive.check_all_ended()


def test_tokens_of_a_run_are_known_as_its_steps_end():
    drive = drive_of("p")
    [sequence_id] = drive.add("p", prompt=3, max_tokens=9)
    counts = []
    while sequence_id not in drive.ends:
        drive.run(until_s=drive.now + STEP_S / 2)
        counts.append(len(drive.tokens[sequence_id]))
    assert set(counts) == set(range(counts[0], 10)), "one more with each step"


def test_a_step_behind_a_run_begins_where_that_will_end():
    drive = drive_of("p", is_ahead=True)
    drive.add("p", prompt=3, max_tokens=30)
    while not drive.cluster.behind:
        drive.run(until_s=drive.now + STEP_S / 2)
    (running,), (behind,) = drive.cluster.running.values(), drive.cluster.behind.values()
    assert behind.rows[0].num_cached_tokens == running.rows[0].num_cached_tokens + running.num_steps
    drive.run()
    drive.check_all_ended()


def test_a_run_ends_early_when_all_its_sequences_have_ended():
    seed = 0
    place = next(p for p in range(7, 60) if token_at(seed, p) not in [token_at(seed, q) for q in range(p)])
    drive = drive_of("p")
    [sequence_id] = drive.add("p", prompt=3, max_tokens=100, stops=[token_at(seed, place)])
    drive.run()
    assert drive.ends[sequence_id].finish_reason is FinishReason.STOP
    assert drive.core.num_steps == len(drive.tokens[sequence_id]), "no step beyond its end"
    drive.check_all_ended()


@pytest.mark.parametrize(("field", "value"), [("has_stop_strings", True), ("constraint", AnyToken())])
def test_who_has_to_see_each_token_gets_steps_one_by_one(field, value):
    drive = drive_of("p")
    [sequence_id] = drive.add("p", prompt=3, max_tokens=20)
    setattr(drive.requests[sequence_id], field, value)
    drive.run(until_s=10 * STEP_S)
    assert set(runs_of(drive)) == {1}


def test_while_a_model_waits_for_a_lane_no_other_takes_several_steps():
    drive = drive_of("p", "q", "r")
    ids = [drive.add(name, prompt=2, max_tokens=60)[0] for name in "pqr"]
    while not all(drive.tokens[sequence_id] for sequence_id in ids):
        drive.run(until_s=drive.now + STEP_S / 2)
    before = len(runs_of(drive))
    drive.run(until_s=drive.now + 30 * STEP_S)
    assert set(runs_of(drive)[before:]) == {1}


def test_one_that_waits_to_join_comes_in_after_the_run():
    drive = drive_of("p")
    drive.add("p", prompt=3, max_tokens=40)
    drive.run(until_s=10 * STEP_S)
    drive.add("p", prompt=150, max_tokens=4)  # ten chunks: meanwhile steps are handed out one by one
    before = len(drive.cluster.steps)
    drive.run()
    later = [step for step in drive.cluster.steps[before:] if step.header.phase == "decode"]
    assert 1 in [step.num_steps for step in later]
    assert any(len(step.rows) == 2 for step in later)
    drive.check_all_ended()


def test_a_sequence_that_would_lack_a_page_within_a_run_takes_one_step():
    drive = drive_of("p", num_frames=4, admission="forecast")
    for _ in range(2):
        drive.add("p", prompt=3, max_tokens=10)
    drive.run()
    assert 1 in runs_of(drive)
    drive.check_all_ended()


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    decode_steps=st.integers(2, 9),
    fail_rate=st.sampled_from([0.0, 0.1]),
    aborts=st.lists(st.integers(0, 11), max_size=3),
    has_stops=st.booleans(),
)
def test_tokens_are_those_of_steps_one_by_one(seed, lengths, decode_steps, fail_rate, aborts, has_stops):
    models = [a_model("p", page_tokens=2), a_model("q", page_tokens=3)]
    config = a_config(96, decode_steps=decode_steps, num_decode_lanes=2)
    drive = Drive(config, models, seed=seed, fail_rate=fail_rate, is_ahead=True)
    stops = range(0, 64, 9) if has_stops else ()
    ids = [drive.add("pq"[n % 2], prompt=1 + n, max_tokens=length, stops=stops)[0] for n, length in enumerate(lengths)]
    for number in aborts:
        drive.run(until_s=drive.now + 0.02)
        if number < len(ids):
            drive.end(ids[number])
    if seed % 3 == 0:
        rank = "kv0" if seed % 2 else "w0"
        drive.cluster.lose(rank, drive.now, back_in_s=0.05)
    drive.run()
    drive.check_all_ended()
