"""The core drives steps: tokens, turns, chunks, groups, deadlines, aborts, stop tokens."""

import pytest

from crosspool.core import FinishReason
from crosspool.errors import (
    CapacityError,
    ContextLengthError,
    DeadlineExceededError,
    ModelRemovedError,
    QueueFullError,
    UnknownModelError,
)
from tests.support.core_drive import Drive, a_config, a_model
from tests.support.scripted_tokens import token_at


def test_requests_of_three_models_get_their_tokens():
    drive = Drive(a_config(), [a_model("p"), a_model("q", frames_per_page=3), a_model("r", page_tokens=8)])
    for model in "pqr":
        drive.add(model, prompt=21, max_tokens=9)
    drive.run()
    assert [len(tokens) for tokens in drive.tokens.values()] == [9, 9, 9]
    assert {end.finish_reason for end in drive.ends.values()} == {FinishReason.LENGTH}
    drive.check_all_ended()


def test_a_stop_token_ends_a_sequence_but_not_below_min_tokens():
    drive = Drive(a_config(), [a_model("p")])
    stop = token_at(0, 5)
    [first] = drive.add("p", prompt=5, max_tokens=8, stops=[stop])
    drive.run()
    assert drive.tokens[first] == [stop]
    assert drive.ends[first].finish_reason is FinishReason.STOP
    again = token_at(1, 6)
    [second] = drive.add("p", prompt=5, max_tokens=8, stops=[token_at(1, 5), again], min_tokens=2)
    drive.run()
    assert drive.tokens[second] == [token_at(1, 5), again]
    drive.check_all_ended()


def test_a_prompt_is_prefilled_in_chunks_and_sampled_once():
    drive = Drive(a_config(max_num_batched_tokens=16), [a_model("p")])
    drive.add("p", prompt=40, max_tokens=2)
    drive.run()
    prefill = [step for step in drive.cluster.steps if step.header.phase == "prefill"]
    assert [step.header.num_tokens for step in prefill] == [16, 16, 8]
    assert [step.rows[0].sample for step in prefill] == [False, False, True]
    assert {step.header.priority for step in prefill} == {1}
    assert [len(step.joining) for step in drive.cluster.steps] == [1, 0, 0, 0]


def test_decode_requests_of_a_model_share_one_step():
    drive = Drive(a_config(), [a_model("p")])
    for _ in range(4):
        drive.add("p", prompt=3, max_tokens=6)
    drive.run()
    widest = max(len(step.rows) for step in drive.cluster.steps if step.header.phase == "decode")
    assert widest == 4


@pytest.mark.parametrize("is_ahead", [False, True])
def test_more_models_than_lanes_take_equal_turns(is_ahead):
    models = [a_model(f"m{index}") for index in range(5)]
    drive = Drive(a_config(256), models, is_ahead=is_ahead)
    for model in models:
        drive.cluster.durations[model.name] = 0.01
        drive.add(model.name, prompt=2, max_tokens=200)
    drive.run(until_s=0.01 * 5 + 1.0)
    decode = [step.header.model for step in drive.cluster.steps if step.header.phase == "decode"]
    counts = [decode.count(model.name) for model in models]
    assert min(counts) > 20
    assert max(counts) - min(counts) <= 4, counts  # models start to decode one prefill after another
    assert (drive.num_ahead > 100) == is_ahead


def test_a_shallow_model_is_not_tied_to_a_deep_one():
    drive = Drive(a_config(256), [a_model("deep"), a_model("shallow")])
    drive.cluster.durations = {"deep": 0.1, "shallow": 0.01}
    drive.add("deep", prompt=2, max_tokens=100)
    drive.add("shallow", prompt=2, max_tokens=100)
    drive.run(until_s=1.2)
    decode = [step.header.model for step in drive.cluster.steps if step.header.phase == "decode"]
    assert decode.count("shallow") >= 8 * decode.count("deep") > 0


def test_short_prompts_do_not_wait_for_a_long_one():
    drive = Drive(a_config(1024, max_num_batched_tokens=32), [a_model("p", max_context=4096), a_model("q")])
    drive.cluster.durations = {"p": 0.01, "q": 0.01}
    [long] = drive.add("p", prompt=2400, max_tokens=1)
    drive.run(until_s=0.05)
    short = [drive.add(model, prompt=10, max_tokens=1)[0] for model in "pq" for _ in range(5)]
    started = drive.now
    drive.run()
    assert max(drive.first_token_s[sequence_id] for sequence_id in short) - started < 0.15
    alone_s = 2400 / 32 * 0.01
    assert drive.first_token_s[long] < 1.5 * alone_s
    drive.check_all_ended()


@pytest.mark.parametrize(("prompt", "max_tokens"), [(9, 1020), (1025, 1), (1024, 1)])
def test_a02_over_long_requests_are_refused_with_true_numbers(prompt, max_tokens):
    drive = Drive(a_config(4096), [a_model("p", max_context=1024)])
    with pytest.raises(ContextLengthError) as refusal:
        drive.add("p", prompt, max_tokens)
    for number in (prompt, max_tokens, prompt + max_tokens, 1024):
        assert str(number) in str(refusal.value)
    drive.add("p", 1000, 24)
    drive.run()
    assert [len(tokens) for tokens in drive.tokens.values()] == [24]
    assert drive.core.stats(drive.now).models[0].num_refused == 1


@pytest.mark.parametrize("admission", ["reserve", "forecast"])
def test_a06_what_the_pool_can_never_hold_is_refused_and_the_next_one_runs(admission):
    model = a_model("p", page_tokens=16, max_context=2048)
    drive = Drive(a_config(48, admission=admission), [model])
    assert drive.core.context_limit(model) == 768
    for prompt, max_tokens in ((900, 20), (700, 300)):
        with pytest.raises(CapacityError, match=rf"{prompt} .*{max_tokens} .*768 tokens"):
            drive.add("p", prompt, max_tokens)
    drive.add("p", 10, 8)
    drive.add("p", 760, 8)
    drive.run()
    drive.check_all_ended()


def test_a_model_whose_page_exceeds_the_pool_is_refused():
    drive = Drive(a_config(4), [])
    with pytest.raises(CapacityError, match="5 frames"):
        drive.core.add_model(a_model("p", frames_per_page=5))


def test_a18_the_queue_is_bounded_and_others_are_unaffected():
    drive = Drive(a_config(1000, max_queue=32, max_num_seqs=8), [a_model("p"), a_model("q")])
    for _ in range(32 + 8):
        drive.add("p", 5, 5)
    for _ in range(460):
        with pytest.raises(QueueFullError) as full:
            drive.add("p", 5, 5)
        assert full.value.retry_after_s >= 1
    for _ in range(5):
        drive.add("q", 5, 5)
    drive.run()
    q_done = max(drive.ends[s].time_s for s, request in drive.requests.items() if request.model == "q")
    assert q_done < 0.3 * max(end.time_s for end in drive.ends.values())
    drive.check_all_ended()


def test_a_group_is_accepted_whole_or_not_at_all():
    drive = Drive(a_config(100, max_queue=3, max_num_seqs=2), [a_model("p")])
    drive.add("p", n=3)
    before = drive.core.stats(0.0)
    with pytest.raises(QueueFullError):
        drive.add("p", n=3)
    after = drive.core.stats(0.0)
    assert (after.models[0].num_queued, after.pools) == (before.models[0].num_queued, before.pools)
    with pytest.raises(QueueFullError):
        drive.add("p", n=6)
    drive.run()
    drive.check_all_ended()


def test_a18_a_request_past_its_deadline_is_dropped_before_any_prefill():
    drive = Drive(a_config(max_num_seqs=1), [a_model("p")])
    drive.cluster.durations["p"] = 1.0
    drive.add("p", 3, 10)
    [late] = drive.add("p", 3, 3, deadline_s=2.5)
    drive.run()
    assert isinstance(drive.ends[late].error, DeadlineExceededError)
    assert drive.ends[late].time_s == 2.5
    assert not any(row.sequence_id == late for step in drive.cluster.steps for row in step.rows)
    drive.check_all_ended()


def test_a_deadline_does_not_end_what_has_started():
    drive = Drive(a_config(), [a_model("p")])
    drive.cluster.durations["p"] = 1.0
    [only] = drive.add("p", 3, 5, deadline_s=2.0)
    drive.run()
    assert drive.ends[only].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("turns", range(8))
def test_an_abort_in_any_state_frees_pages_once_no_step_uses_them(turns):
    drive = Drive(a_config(max_num_seqs=1, max_num_batched_tokens=4), [a_model("p")])
    ids = [drive.add("p", 10, 10)[0], drive.add("p", 10, 10)[0]]
    for _ in range(turns):
        drive.turn()
        drive.now = drive.next_moment()
    assert all(drive.end(sequence_id) for sequence_id in ids)
    assert not any(drive.end(sequence_id) for sequence_id in ids)
    in_flight = {row.sequence_id for step in drive.cluster.running.values() for row in step.rows}
    held = drive.core.stats(drive.now).pools[0].frames_used
    assert (held > 0) == bool(in_flight)
    drive.run()
    drive.check_all_ended()


def test_while_a_running_sequence_lacks_a_page_nothing_is_admitted():
    drive = Drive(a_config(10, admission="forecast"), [a_model("p")])
    for _ in range(40):
        drive.core._estimate.record("p", 33)
    drive.core._estimate.expected_tokens = lambda model, num_generated, max_tokens: num_generated + 1
    long = [drive.add("p", prompt=4, max_tokens=32)[0] for _ in range(2)]
    while not drive.core.dispatcher.num_stalls:
        drive.turn()
        drive.now = drive.next_moment()
    [small] = drive.add("p", prompt=1, max_tokens=2)
    assert drive.core.stats(drive.now).models[0].num_queued == 1
    drive.run()
    assert drive.first_token_s[small] > min(drive.ends[sequence_id].time_s for sequence_id in long)
    drive.check_all_ended()


def test_a_removed_model_ends_or_drains():
    drive = Drive(a_config(), [a_model("p"), a_model("q")])
    drive.add("p", 5, 50)
    [other] = drive.add("q", 5, 5)
    drive.turn()
    drive.core.drain_model("p")
    with pytest.raises(ModelRemovedError):
        drive.add("p")
    drive._take(drive.core.end_model("p", ModelRemovedError("removed"), drive.now))
    assert not drive.core.is_idle("p")  # its step is in flight
    drive.run()
    assert drive.core.is_idle("p")
    drive.core.remove_model("p")
    with pytest.raises(UnknownModelError, match="served models: q"):
        drive.add("p")
    assert drive.ends[other].finish_reason is FinishReason.LENGTH
    drive.core.add_model(a_model("p", frames_per_page=2))
    drive.add("p", 5, 5)
    drive.cluster.models["p"] = a_model("p", frames_per_page=2)
    drive.run()
    drive.check_all_ended()
