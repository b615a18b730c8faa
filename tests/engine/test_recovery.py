"""What happens to steps and requests when ranks are lost, come back, or do not."""

import json
from dataclasses import asdict

import pytest

from crosspool.cluster.base import RankFailed, RankLost, RankReady, StepDone, StepFailed
from crosspool.core import FinishReason
from crosspool.errors import StepError, WorkerLostError
from tests.support.core_drive import Drive, a_config, a_model


def three_models() -> list:
    return [
        a_model("p", weights_ranks=["w0"]),
        a_model("q", weights_ranks=["w1"]),
        a_model("r", weights_ranks=["w0", "w1"]),
    ]


def started(drive: Drive, *models: str, max_tokens: int = 200) -> list[int]:
    """One request of each model, all of them decoding."""
    ids = [drive.add(model, prompt=4, max_tokens=max_tokens)[0] for model in models]
    drive.run(until_s=drive.now + 0.3)
    assert all(drive.tokens[sequence_id] for sequence_id in ids)
    return ids


def steps_since(drive: Drive, count: int) -> set[str]:
    return {step.header.model for step in drive.cluster.steps[count:]}


def test_a_lost_weights_rank_holds_up_only_the_models_that_need_it():
    drive = Drive(a_config(256), three_models())
    started(drive, "p", "q", "r")
    drive.cluster.lose("w0", drive.now, back_in_s=2.0)
    drive.run(until_s=drive.now + 0.1)
    count = len(drive.cluster.steps)
    drive.run(until_s=drive.now + 1.0)
    assert steps_since(drive, count) == {"q"}
    assert len(drive.core.dispatcher.parked_steps.steps) == 2  # neither holds a lane that q could use
    drive.run()
    assert {end.finish_reason for end in drive.ends.values()} == {FinishReason.LENGTH}
    assert drive.core.dispatcher.parked_steps.num_replays >= 2
    drive.check_all_ended()


def test_a_replay_has_the_same_rows_under_a_new_number():
    drive = Drive(a_config(), [a_model("p")])
    [sequence_id] = started(drive, "p")
    drive.cluster.lose("w0", drive.now, back_in_s=0.5)
    drive.run(until_s=drive.now + 0.4)
    failed = drive.cluster.steps[-1]
    drive.run(until_s=drive.now + 0.3)
    count = drive.cluster.steps.index(failed)
    replay = drive.cluster.steps[count + 1]
    assert replay.rows == failed.rows
    assert replay.header.step_seq > failed.header.step_seq
    assert replay.rows[0].sequence_id == sequence_id


def test_a_row_that_ends_while_its_step_is_parked_is_left_out_and_frees_its_pages_at_once():
    drive = Drive(a_config(256), [a_model("p")])
    ids = started(drive, "p", "p", "p")
    drive.cluster.lose("w0", drive.now, back_in_s=1.0)
    drive.run(until_s=drive.now + 0.1)
    before = drive.core.stats(drive.now).pools[0].frames_used
    drive.end(ids[1])
    assert drive.core.stats(drive.now).pools[0].frames_used < before
    drive.run()
    assert drive.ends[ids[1]].finish_reason is FinishReason.ABORT
    assert drive.core.dispatcher.parked_steps.num_replays >= 1
    drive.check_all_ended()


def test_a_lost_kv_rank_sends_its_sequences_back_to_the_head_of_their_queues():
    drive = Drive(a_config(max_num_seqs=2), [a_model("p")])
    drive.cluster.durations["p"] = 0.01
    ids = started(drive, "p", "p", max_tokens=50)
    waiting = drive.add("p", 4, 5)
    got = {sequence_id: len(drive.tokens[sequence_id]) for sequence_id in ids}
    drive.cluster.lose("kv0", drive.now, back_in_s=0.2)
    drive.run(until_s=drive.now + 0.1)
    assert [sequence.sequence_id for sequence in drive.core.live_models["p"].queue] == [*ids, *waiting]
    assert drive.core.stats(drive.now).pools[0].frames_used == 0
    count = len(drive.cluster.steps)
    drive.run()
    again = drive.cluster.steps[count]
    assert {new.sequence_id for new in again.joining} == set(ids)
    for new in again.joining:
        assert len(new.output_token_ids) >= got[new.sequence_id] > 0
    drive.check_all_ended()


def test_generated_tokens_whose_kv_was_lost_run_again_in_small_steps_behind_their_prompt():
    drive = Drive(a_config(256, rerun_tokens=3), [a_model("p")])
    [sequence_id] = started(drive, "p", max_tokens=80)
    drive.cluster.lose("kv0", drive.now, back_in_s=0.2)
    count, generated = len(drive.cluster.steps), len(drive.tokens[sequence_id])
    drive.run()
    again = [step for step in drive.cluster.steps[count:] if step.header.phase == "prefill"]
    rows = [(step.rows[0].num_cached_tokens, step.rows[0].num_new_tokens, step.rows[0].sample) for step in again]
    assert rows[0][:2] == (0, 4)
    behind = rows[1:]
    assert all(cached >= 4 and new <= 3 for cached, new, _ in behind)
    assert sum(new for _, new, _ in behind) >= generated
    assert [sample for *_, sample in rows] == [False] * (len(rows) - 1) + [True]
    drive.check_all_ended()


def test_past_the_recovery_bound_exactly_the_requests_that_need_the_rank_end_with_an_error():
    drive = Drive(a_config(256, recovery_timeout_s=1.0), three_models())
    p, q, r = started(drive, "p", "q", "r")
    queued = [drive.add("p", 4, 4)[0] for _ in range(3)]
    lost_s = drive.now
    drive.cluster.lose("w0", drive.now, back_in_s=None)
    drive.run()
    for sequence_id in (p, r, *queued):
        assert isinstance(drive.ends[sequence_id].error, WorkerLostError)
        assert "rank w0 has been down for 1.0 s (killed)" in str(drive.ends[sequence_id].error)
        assert drive.ends[sequence_id].time_s == pytest.approx(lost_s + 1.0, abs=0.02)
    assert drive.ends[q].finish_reason is FinishReason.LENGTH
    with pytest.raises(WorkerLostError, match="w0"):
        drive.add("r")
    [later] = drive.add("q", 4, 4)
    drive.run()
    assert drive.ends[later].error is None
    drive.check_all_ended()


@pytest.mark.parametrize("rank", ["w0", "kv0"])
def test_with_a_recovery_timeout_of_zero_the_error_comes_at_once(rank):
    drive = Drive(a_config(256, recovery_timeout_s=0.0), three_models())
    p, q, r = started(drive, "p", "q", "r")
    drive.cluster.lose(rank, drive.now, back_in_s=5.0)
    lost_s = drive.now
    drive.run(until_s=lost_s + 0.05)
    hit = {p, r} if rank == "w0" else {p, q, r}
    assert hit <= set(drive.ends)
    assert all(drive.ends[sequence_id].time_s == lost_s for sequence_id in hit)
    assert all(isinstance(drive.ends[sequence_id].error, WorkerLostError) for sequence_id in hit)
    drive.run()
    drive.add("p", 4, 4)
    drive.run()
    drive.check_all_ended()


def test_a_rank_that_the_cluster_gives_up_ends_its_requests_at_once():
    drive = Drive(a_config(256, recovery_timeout_s=1000.0), three_models())
    p, q, r = started(drive, "p", "q", "r")
    drive.cluster.lose("w0", drive.now, back_in_s=None)
    drive.run(until_s=drive.now + 0.1)
    drive._take(drive.core.on_event(RankFailed(rank="w0", error="3 failed starts"), drive.now))
    assert drive.core.stats(drive.now).ranks_given_up == {"w0": "3 failed starts"}
    assert {p, r} <= set(drive.ends)
    assert "3 failed starts" in str(drive.ends[p].error)
    drive.run()
    assert drive.ends[q].finish_reason is FinishReason.LENGTH
    drive._take(drive.core.on_event(RankReady(rank="w0", seconds=1.0), drive.now))
    del drive.cluster.down["w0"]
    drive.add("p", 4, 4)
    drive.run()
    drive.check_all_ended()


def test_a_fatal_failure_ends_the_requests_of_its_step_and_no_others():
    drive = Drive(a_config(256), [a_model("p"), a_model("q")])
    p, q = started(drive, "p", "q")
    drive.turn()
    step = next(step for step in drive.cluster.running.values() if step.header.model == "p")
    drive.cluster.fail_now(step.header.lane)
    failed = StepFailed(
        lane=step.header.lane,
        step_seq=step.header.step_seq,
        waiting_on=(),
        error="kv0: ValueError: bad row",
        fatal=True,
    )
    drive._take(drive.core.on_event(failed, drive.now))
    assert isinstance(drive.ends[p].error, StepError)
    assert "bad row" in str(drive.ends[p].error)
    drive.run()
    assert drive.ends[q].finish_reason is FinishReason.LENGTH
    drive.check_all_ended()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_of_a_batch_in_which_a_worker_raises_only_the_culprit_ends(phase):
    drive = Drive(a_config(256, max_num_batched_tokens=64), [a_model("p")])
    ids = [drive.add("p", prompt=10, max_tokens=20)[0] for _ in range(4)]
    drive.cluster.poison[ids[2]] = phase
    drive.run()
    assert isinstance(drive.ends[ids[2]].error, StepError)
    assert f"sequence {ids[2]}" in str(drive.ends[ids[2]].error)
    for sequence_id in (ids[0], ids[1], ids[3]):
        assert drive.ends[sequence_id].finish_reason is FinishReason.LENGTH
    drive.check_all_ended()


def test_a_step_that_keeps_failing_without_a_lost_rank_is_reruned_with_pauses_and_then_given_up():
    drive = Drive(a_config(recovery_timeout_s=5.0), [a_model("p")], fail_rate=1.0)
    drive.cluster.durations["p"] = 0.001
    [sequence_id] = drive.add("p", 4, 4)
    drive.run()
    assert isinstance(drive.ends[sequence_id].error, WorkerLostError)
    assert "no flag came" in str(drive.ends[sequence_id].error)
    assert 4.0 < drive.ends[sequence_id].time_s < 6.1
    assert 5 < len(drive.cluster.steps) < 20
    drive.check_all_ended()


def test_a_request_under_which_the_kv_rank_dies_again_and_again_is_given_up():
    drive = Drive(a_config(recovery_timeout_s=1000.0), [a_model("p")])
    drive.cluster.durations["p"] = 0.5
    [sequence_id] = drive.add("p", 4, 4)
    for _ in range(8):
        drive.run(until_s=drive.now + 0.2)
        drive.cluster.lose("kv0", drive.now, back_in_s=0.1)
    drive.run()
    assert "6 times in a row without a token" in str(drive.ends[sequence_id].error)
    drive.check_all_ended()


def test_news_of_steps_that_nobody_waits_for_is_ignored():
    drive = Drive(a_config(), [a_model("p")])
    started(drive, "p")
    for event in (
        StepFailed(lane=0, step_seq=1, waiting_on=("w0",), error="old"),
        StepFailed(lane=2, step_seq=99, waiting_on=("w0",), error="never sent"),
        RankReady(rank="w0", seconds=0.0),
    ):
        assert drive.core.on_event(event, drive.now) == []
    drive.run()
    drive.check_all_ended()


def test_a_result_of_a_kv_rank_that_has_been_lost_is_ignored():
    drive = Drive(a_config(), [a_model("p")])
    [sequence_id] = started(drive, "p", max_tokens=100)
    drive.turn()
    [step] = drive.cluster.running.values()
    tokens = len(drive.tokens[sequence_id])
    drive._take(drive.core.on_event(RankLost(rank="kv0", reason="killed"), drive.now))
    late = StepDone(result=drive.cluster.sequences.result(step))
    drive._take(drive.core.on_event(late, drive.now))
    drive.cluster.fail_now(step.header.lane)
    drive.cluster.known.clear()
    assert len(drive.tokens[sequence_id]) == tokens
    drive._take(drive.core.on_event(RankReady(rank="kv0", seconds=1.0), drive.now))
    drive.run()
    drive.check_all_ended()


def test_requests_that_come_while_a_rank_is_down_wait_for_it():
    drive = Drive(a_config(), [a_model("p")])
    drive.turn()
    drive._take(drive.core.on_event(RankLost(rank="w0", reason="killed"), 0.0))
    drive.cluster.down["w0"] = set()
    [sequence_id] = drive.add("p", 4, 4)
    drive.run(until_s=1.0)
    assert not drive.cluster.steps
    del drive.cluster.down["w0"]
    drive._take(drive.core.on_event(RankReady(rank="w0", seconds=1.0), drive.now))
    drive.run()
    assert len(drive.tokens[sequence_id]) == 4


def test_a_model_that_a_lost_weights_rank_holds_again_goes_on_before_the_others():
    drive = Drive(a_config(256), three_models())
    [first, _, last] = started(drive, "p", "q", "r")
    drive.cluster.lose("w0", drive.now, back_in_s=3.0, models_in_s={"r": 1.0})
    drive.run(until_s=drive.now + 1.1)
    count, got = len(drive.cluster.steps), {name: len(drive.tokens[name]) for name in (first, last)}
    drive.run(until_s=drive.now + 1.0)
    assert steps_since(drive, count) == {"q", "r"}
    assert len(drive.tokens[first]) == got[first]
    assert len(drive.tokens[last]) > got[last]
    drive.run()
    drive.check_all_ended()


def test_a_kv_rank_that_holds_one_model_again_takes_its_sequences_and_no_others():
    drive = Drive(a_config(256), three_models())
    ids = started(drive, "p", "q", "r", max_tokens=60)
    drive.cluster.lose("kv0", drive.now, back_in_s=2.0, models_in_s={"q": 0.5})
    drive.run(until_s=drive.now + 0.4)
    count = len(drive.cluster.steps)
    drive.run(until_s=drive.now + 1.5)
    assert steps_since(drive, count) == {"q"}
    assert ids[1] in drive.ends
    drive.run()
    assert {end.finish_reason for end in drive.ends.values()} == {FinishReason.LENGTH}
    drive.check_all_ended()


def test_a_rank_that_is_lost_again_holds_nothing_of_what_it_had_again():
    drive = Drive(a_config(256), three_models())
    [sequence_id] = started(drive, "p", max_tokens=60)
    drive.cluster.lose("w0", drive.now, back_in_s=3.0, models_in_s={"p": 0.2})
    drive.run(until_s=drive.now + 0.3)
    drive.cluster.lose("w0", drive.now, back_in_s=1.0)
    drive.run(until_s=drive.now + 0.2)
    count = len(drive.cluster.steps)
    drive.run(until_s=drive.now + 0.5)
    assert len(drive.cluster.steps) == count
    drive.run()
    assert drive.ends[sequence_id].finish_reason is FinishReason.LENGTH
    drive.check_all_ended()


def test_a_request_to_a_model_that_is_back_waits_for_nothing_past_the_bound():
    drive = Drive(a_config(256, recovery_timeout_s=1.0), three_models())
    started(drive, "p", "r")
    drive.cluster.lose("w0", drive.now, back_in_s=None, models_in_s={"p": 0.5})
    drive.run(until_s=drive.now + 1.5)
    [late] = drive.add("p", 4, 3)
    with pytest.raises(WorkerLostError, match="rank w0 has been down for 1"):
        drive.add("r", 4, 3)
    drive.run(until_s=drive.now + 1.0)
    assert drive.ends[late].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("rank", ["w0", "kv0"])
def test_a_model_that_is_first_loaded_by_a_rank_on_its_way_back_is_served_at_once(rank):
    drive = Drive(a_config(256), three_models())
    drive.cluster.lose(rank, drive.now, back_in_s=2.0)
    drive.run(until_s=drive.now + 0.5)
    new = a_model("new")
    drive.cluster.models[new.name] = new
    drive.cluster.down[rank].add(new.name)  # as every rank of a model has loaded it once it is ready
    drive.core.add_model(new)
    [sequence_id], [late] = drive.add("new", 4, 3), drive.add("p", 4, 3)
    drive.run(until_s=drive.now + 1.0)
    assert drive.ends[sequence_id].finish_reason is FinishReason.LENGTH
    assert late not in drive.ends
    drive.run()
    drive.check_all_ended()


def test_what_is_told_of_a_rank_on_its_way_back_is_plain_json():
    drive = Drive(a_config(256), three_models())
    drive.cluster.lose("w0", drive.now, back_in_s=None, models_in_s={"r": 0.2, "p": 0.1})
    drive.run(until_s=drive.now + 0.5)
    told = json.loads(json.dumps(asdict(drive.core.stats(drive.now))))
    assert (list(told["ranks_down"]), told["held_again"]) == (["w0"], {"w0": ["p", "r"]})


def test_models_with_more_requests_to_end_are_wanted_more():
    drive = Drive(a_config(256, max_num_seqs=1), three_models())
    started(drive, "q")
    assert drive.core.most_wanted()[0] == "q"
    for _ in range(3):  # one of them runs at a time: queued ones count
        drive.add("r", 4, 50)
    assert drive.core.most_wanted() == ["r", "q", "p"]
