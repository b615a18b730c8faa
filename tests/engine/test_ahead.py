"""Steps handed out behind running ones: what they hold, what becomes of them, and that no token is another one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.cluster.base import RankLost, StepFailed
from crosspool.core import FinishReason
from tests.support.any_token import AnyToken
from tests.support.core_drive import Drive, a_config, a_model
from tests.support.scripted_tokens import token_at

STEP_S = 0.01


def decoding(drive: Drive, *models: str, max_tokens: int = 50, **options) -> list[int]:
    """One request of each model, all past their prefill; a step of each takes STEP_S."""
    for name in dict.fromkeys(models):
        drive.cluster.durations[name] = STEP_S
    ids = [drive.add(name, prompt=3, max_tokens=max_tokens, **options)[0] for name in models]
    while not all(drive.tokens[sequence_id] for sequence_id in ids):
        drive.run(until_s=drive.now + STEP_S / 2)
    return ids


def steps_of(drive: Drive, sequence_id: int):
    rows = ((step, row) for step in drive.cluster.steps for row in step.rows)
    return [(step, row) for step, row in rows if row.sequence_id == sequence_id]


def test_the_next_step_is_with_the_cluster_before_the_running_one_has_ended():
    drive = Drive(a_config(), [a_model("p")], is_ahead=True)
    [sequence_id] = decoding(drive, "p")
    (running,), (behind,) = drive.cluster.running.values(), drive.cluster.behind.values()
    assert behind.header.step_seq == running.header.step_seq + 1
    assert behind.rows[0].num_cached_tokens == running.rows[0].num_cached_tokens + 1
    assert behind.rows[0].token_ids is None
    drive.run()
    assert drive.tokens[sequence_id] == drive.expected(sequence_id)
    drive.check_all_ended()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_a_sequence_has_a_row_for_each_of_its_tokens_and_none_beyond(max_tokens):
    drive = Drive(a_config(), [a_model("p", max_context=3 + max_tokens)], is_ahead=True)
    ids = [drive.add("p", prompt=3, max_tokens=max_tokens)[0], drive.add("p", prompt=2, max_tokens=1)[0]]
    drive.run()
    assert len(steps_of(drive, ids[0])) == max_tokens  # the first comes with the prefill
    drive.check_all_ended()


def test_one_that_joins_meanwhile_gets_a_row_in_the_next_step_that_is_handed_out():
    drive = Drive(a_config(), [a_model("p")], is_ahead=True)
    decoding(drive, "p")
    drive.add("p", prompt=3, max_tokens=5)
    drive.run()
    counts = [len(step.rows) for step in drive.cluster.steps if step.header.phase == "decode"]
    assert counts.count(2) == 4
    drive.check_all_ended()


def test_an_end_token_makes_its_row_behind_useless_and_its_pages_stay_until_that_step_has_ended():
    drive = Drive(a_config(), [a_model("p", page_tokens=1)], is_ahead=True)
    seed = 0
    place = next(
        place for place in range(6, 60) if token_at(seed, place) not in [token_at(seed, p) for p in range(place)]
    )
    [sequence_id] = decoding(drive, "p", stops=[token_at(seed, place)])
    while sequence_id not in drive.ends:
        drive.run(until_s=drive.now + STEP_S / 2)
    assert drive.ends[sequence_id].finish_reason is FinishReason.STOP
    (running,) = drive.cluster.running.values()
    assert running.rows[0].sequence_id == sequence_id
    pages = drive.core.kv.by_rank["kv0"]
    frames_needed = running.rows[0].num_cached_tokens + 1
    assert pages.pool.budget - pages.pool.num_free == frames_needed, "the step in flight writes a slot of each"
    assert drive.cluster.known["kv0"], "the KV worker still needs it"
    drive.run()
    drive.check_all_ended()


def test_an_abort_leaves_pages_until_both_steps_have_ended():
    drive = Drive(a_config(), [a_model("p")], is_ahead=True)
    [sequence_id] = decoding(drive, "p")
    drive.end(sequence_id)
    free = []
    while drive.cluster.running:
        drive.run(until_s=drive.now + STEP_S / 2)
        free.append(drive.core.kv.by_rank["kv0"].pool.num_free)
    assert free[0] < free[-1]
    assert len(set(free)) == 2
    drive.check_all_ended()


def test_a_sequence_with_a_grammar_is_never_handed_out_ahead():
    drive = Drive(a_config(), [a_model("p"), a_model("q")], is_ahead=True)
    ids = [drive.add("p", prompt=3, max_tokens=20)[0] for _ in range(2)]
    drive.requests[ids[0]].constraint = grammar = AnyToken()
    drive.add("q", prompt=3, max_tokens=20)
    drive.cluster.durations = {"p": STEP_S, "q": STEP_S}
    for _ in range(100):
        drive.run(until_s=drive.now + STEP_S / 4)
        behind = [step.header.model for step in drive.cluster.behind.values()]
        assert "p" not in behind or ids[0] in drive.ends
    assert grammar.num_seen == 19
    assert drive.num_ahead > 10, "the other model's steps are"
    drive.check_all_ended()


def test_up_to_as_many_models_as_lanes_keep_their_lanes():
    drive = Drive(a_config(256, num_decode_lanes=2), [a_model("deep"), a_model("shallow")], is_ahead=True)
    drive.cluster.durations = {"deep": 0.1, "shallow": 0.01}
    for name in ("deep", "shallow"):
        drive.add(name, prompt=2, max_tokens=150)
    drive.run(until_s=1.2)
    decode = [step.header.model for step in drive.cluster.steps if step.header.phase == "decode"]
    assert decode.count("shallow") >= 8 * decode.count("deep") > 0


def test_a_model_of_another_kv_rank_is_not_passed_by_for_ever():
    names = ("a", "b", "c")
    drive = Drive(a_config(256), [*map(a_model, names), a_model("d", kv_rank="kv1")], is_ahead=True)
    for name in (*names, "d"):
        drive.cluster.durations[name] = STEP_S
        drive.add(name, prompt=2, max_tokens=200)
    drive.run(until_s=1.0)
    decode = [step.header.model for step in drive.cluster.steps if step.header.phase == "decode"]
    assert decode.count("d") >= 0.8 * decode.count("a") > 0


def test_a_model_that_comes_gets_a_lane_although_others_hold_all_of_them():
    drive = Drive(a_config(num_decode_lanes=1), [a_model("p"), a_model("q")], is_ahead=True)
    decoding(drive, "p", max_tokens=150)
    drive.cluster.durations["q"] = STEP_S
    drive.add("q", prompt=2, max_tokens=3)
    count = len(drive.cluster.steps)
    drive.run(until_s=drive.now + 8 * STEP_S)
    assert [step.header.model for step in drive.cluster.steps[count:]].count("q") == 3
    drive.run()
    drive.check_all_ended()


def test_a_step_behind_a_failed_one_is_taken_back_with_the_pages_it_brought():
    drive = Drive(a_config(), [a_model("p", page_tokens=1)], is_ahead=True)
    [sequence_id] = decoding(drive, "p")
    (running,), (behind,) = drive.cluster.running.values(), drive.cluster.behind.values()
    assert behind.rows[0].new_pages
    failures = [
        StepFailed(lane=step.header.lane, step_seq=step.header.step_seq, waiting_on=("w0",), error="no flag came")
        for step in (running, behind)
    ]
    drive.cluster.fail_now(running.header.lane)
    drive.cluster.behind.clear()
    drive.core.on_event(failures[0], drive.now)
    assert drive.core.schedule_ahead(drive.now) == [], "a parked step comes first"
    drive.core.on_event(failures[1], drive.now)
    drive.run()  # the simulated cluster asserts that every step has its pages
    assert drive.tokens[sequence_id] == drive.expected(sequence_id)
    assert drive.core.dispatcher.parked_steps.num_replays == 1
    drive.check_all_ended()


def test_a_step_that_fails_before_it_runs_leaves_the_one_before_it_alone():
    drive = Drive(a_config(), [a_model("p", page_tokens=1)], is_ahead=True)
    [sequence_id] = decoding(drive, "p")
    (behind,) = drive.cluster.behind.values()
    header = behind.header
    drive.cluster.behind.clear()
    away = StepFailed(lane=header.lane, step_seq=header.step_seq, waiting_on=("w0",), error="w0 is away")
    assert drive.core.on_event(away, drive.now) == []
    drive.run()
    assert drive.tokens[sequence_id] == drive.expected(sequence_id)
    assert drive.core.dispatcher.parked_steps.num_replays == 0
    drive.check_all_ended()


def test_a_lost_kv_rank_takes_both_steps_and_their_ends_are_ignored():
    drive = Drive(a_config(), [a_model("p")], is_ahead=True)
    [sequence_id] = decoding(drive, "p")
    drive.cluster.lose("kv0", drive.now, back_in_s=0.5)
    [event] = [event for event in drive.cluster.due(drive.now) if isinstance(event, RankLost)]
    drive.core.on_event(event, drive.now)
    assert drive.core.schedule_ahead(drive.now) == []
    drive.run()
    assert drive.tokens[sequence_id] == drive.expected(sequence_id)
    drive.check_all_ended()


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    fail_rate=st.sampled_from([0.0, 0.1]),
    aborts=st.lists(st.integers(0, 11), max_size=3),
)
def test_tokens_are_those_of_a_run_in_which_nothing_is_handed_out_ahead(seed, lengths, fail_rate, aborts):
    tokens = []
    for is_ahead in (False, True):
        models = [a_model(name, page_tokens=3) for name in "pqr"]
        drive = Drive(a_config(200), models, seed=seed, fail_rate=fail_rate, is_ahead=is_ahead)
        ids = []
        for index, length in enumerate(lengths):
            ids += drive.add("pqr"[index % 3], prompt=1 + index, max_tokens=length, stops=[seed % 64, index])
            drive.run(until_s=drive.now + 0.004)
        for index in aborts:
            drive.run(until_s=drive.now + 0.02)
            if index < len(ids) and ids[index] not in drive.ends:
                drive.end(ids[index])
        drive.run()
        drive.check_all_ended()  # nothing held, and every token right up to where it was cut
        tokens.append({sequence_id: drive.tokens[sequence_id] for sequence_id in ids if sequence_id not in drive.cut})
    both = tokens[0].keys() & tokens[1].keys()
    assert {key: tokens[0][key] for key in both} == {key: tokens[1][key] for key in both}
