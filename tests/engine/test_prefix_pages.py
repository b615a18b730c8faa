"""The prefix cache in the engine's core: what is reused, who shares it, when it goes. The simulated cluster checks that
every slot a step attends to holds its sequence's own tokens, and that no step writes into a page two sequences have.
"""

import pytest

from crosspool.core import FinishReason
from crosspool.engine.limit_change import LimitChange
from tests.support.core_drive import FRAME_BYTES, Drive, a_config, a_model

PROMPT = list(range(40, 60))  # 20 tokens: 5 pages of 4


def a_drive(*models, num_frames: int = 64, **config) -> Drive:
    return Drive(a_config(num_frames, **config), models or [a_model("p")])


def answered(drive: Drive, model: str, prompt, max_tokens: int = 3, **changes) -> tuple[int, list[int]]:
    """Cached tokens of a request that has the engine to itself, and its answer."""
    [sequence_id] = drive.add(model, prompt, max_tokens, **changes)
    drive.run()
    return drive.ends[sequence_id].cached_tokens, drive.tokens[sequence_id]


def prefilled(drive: Drive, since: int = 0) -> int:
    """Tokens of prefill steps that were handed out."""
    steps = drive.cluster.steps[since:]
    return sum(step.header.num_tokens for step in steps if step.header.phase == "prefill")


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 16)])
def test_full_pages_are_reused_and_the_last_token_is_always_run(length, cached):
    drive = a_drive()
    assert answered(drive, "p", PROMPT[:length])[0] == 0
    since = len(drive.cluster.steps)
    assert answered(drive, "p", PROMPT[:length])[0] == cached
    assert prefilled(drive, since) == length - cached


def test_a_longer_prompt_reuses_what_it_has_in_common():
    drive = a_drive()
    answered(drive, "p", PROMPT)
    assert answered(drive, "p", [*PROMPT[:11], 1, 2, 3])[0] == 8
    assert answered(drive, "p", [0, *PROMPT])[0] == 0


def test_pages_that_an_answer_filled_serve_the_next_turn():
    drive = a_drive()
    turns = list(PROMPT)
    for question in range(3):
        cached, answer = answered(drive, "p", turns, max_tokens=7)
        assert cached == (0 if question == 0 else (len(turns) - 3) // 4 * 4)  # all but the last token and the question
        turns += [*answer, 5, 6]


def test_nothing_is_reused_across_models_salts_or_the_lack_of_one():
    drive = a_drive(a_model("p"), a_model("q"))
    salts = (None, "a", "b")
    for model in "pq":
        for salt in salts:
            assert answered(drive, model, PROMPT, cache_salt=salt)[0] == 0
    for model in "pq":
        for salt in salts:
            assert answered(drive, model, PROMPT, cache_salt=salt)[0] == 16


def test_without_prefix_caching_every_token_is_run():
    drive = a_drive(prefix_caching=False)
    for _ in range(2):
        assert answered(drive, "p", PROMPT)[0] == 0
    assert prefilled(drive) == 2 * len(PROMPT)
    assert drive.core.kv.by_rank["kv0"].prefix is None


def test_sequences_of_one_request_run_their_prompt_once_and_share_its_pages():
    drive = a_drive(num_frames=64, max_num_batched_tokens=16)
    ids = drive.add("p", PROMPT, 30, n=4)
    drive.run(until_s=0.2)
    assert prefilled(drive) == 20 + 3 * 4  # each runs what its last page lacks
    pool = drive.core.stats(drive.now).pools[0]
    tables = [drive.core._sequences[sequence_id].table.pages for sequence_id in ids]
    assert all(table[:4] == tables[0][:4] for table in tables)
    assert pool.frames_used == 4 + sum(len(table) - 4 for table in tables)
    drive.run()
    assert [drive.ends[sequence_id].cached_tokens for sequence_id in ids] == [0, 16, 16, 16]
    drive.check_all_ended()


def test_a_shared_prompt_fits_where_its_copies_would_not():
    drive = a_drive(num_frames=16, max_num_batched_tokens=64)
    answered(drive, "p", PROMPT, max_tokens=1)
    ids = drive.add("p", PROMPT, 4, n=4)  # 4 pages in common and 2 of its own each: 12; as copies 24
    drive.turn()
    assert drive.core.stats(drive.now).models[0].num_prefilling == 4
    drive.run()
    assert [drive.ends[sequence_id].cached_tokens for sequence_id in ids] == [16] * 4
    drive.check_all_ended()


def test_reserve_counts_what_is_shared_once_and_what_is_promised_whole():
    drive = a_drive(num_frames=16, max_num_batched_tokens=64)
    answered(drive, "p", PROMPT, max_tokens=1)
    drive.add("p", PROMPT, 12, n=3)  # 4 in common + 3 x 4 = 16
    drive.turn()
    pool = drive.core.stats(drive.now).pools[0]
    assert (pool.frames_used, pool.frames_reserved, pool.frames_reusable, pool.frames_free) == (7, 9, 0, 0)
    drive.add("p", [1], 1)
    drive.turn()
    assert drive.core.stats(drive.now).models[0].num_queued == 1
    drive.run()
    drive.check_all_ended()
    assert drive.core.dispatcher.num_stalls == 0


def test_an_aborted_prefill_leaves_the_pages_of_steps_that_ended_and_no_others():
    drive = a_drive(max_num_batched_tokens=8)
    drive.cluster.durations["p"] = 0.01
    [sequence_id] = drive.add("p", PROMPT, 5)
    drive.run(until_s=0.015)  # the first chunk has ended, the second is under way
    assert prefilled(drive) == 16
    drive.end(sequence_id)
    assert drive.core.stats(drive.now).models[0].pages_reusable == 0  # the step in flight still writes
    drive.run()
    assert drive.core.stats(drive.now).models[0].pages_reusable == 2
    assert answered(drive, "p", PROMPT)[0] == 8
    drive.check_all_ended()


def test_a_step_that_fails_makes_no_page_known_before_its_replay_has_ended():
    drive = a_drive(max_num_batched_tokens=64)
    drive.cluster.durations["p"] = 0.01
    [sequence_id] = drive.add("p", PROMPT, 3)
    drive.turn()
    drive.cluster.lose("w0", drive.now, back_in_s=0.5)
    drive.run(until_s=0.4)
    assert drive.core.kv.by_rank["kv0"].prefix.cache.num_pages("p") == 0
    drive.run()
    assert drive.core.dispatcher.parked_steps.num_replays >= 1
    assert drive.ends[sequence_id].finish_reason is FinishReason.LENGTH
    assert answered(drive, "p", PROMPT)[0] == 16


def test_a_step_that_fails_for_good_makes_no_page_known():
    drive = a_drive(max_num_batched_tokens=64)
    [sequence_id] = drive.add("p", PROMPT, 3)
    drive.cluster.poison[sequence_id] = "prefill"
    drive.run()
    assert drive.ends[sequence_id].finish_reason is FinishReason.ERROR
    assert drive.core.kv.by_rank["kv0"].prefix.cache.num_pages("p") == 0
    assert answered(drive, "p", PROMPT)[0] == 0


def test_pages_of_a_lost_kv_rank_are_forgotten_and_those_of_others_stay():
    drive = a_drive(a_model("p"), a_model("q", kv_rank="kv1"))
    for model in "pq":
        answered(drive, model, PROMPT)
    running = drive.add("p", PROMPT, 40, n=2)
    drive.run(until_s=drive.now + 0.1)
    drive.cluster.lose("kv0", drive.now, back_in_s=0.2)
    drive.run(until_s=drive.now + 0.1)
    assert drive.core.kv.by_rank["kv0"].prefix.cache.num_pages("p") == 0
    assert drive.core.kv.by_rank["kv0"].pool.num_free == drive.core.kv.by_rank["kv0"].pool.budget
    assert answered(drive, "q", PROMPT)[0] == 16
    drive.run()
    assert [drive.ends[sequence_id].cached_tokens for sequence_id in running] == [16, 16]  # as it was told before
    drive.check_all_ended()
    assert answered(drive, "p", PROMPT)[0] == 16  # filled anew by the second prefill


def test_a_model_that_goes_takes_its_pages_along():
    model = a_model("p")
    drive = a_drive(model, a_model("q"))
    answered(drive, "p", PROMPT)
    drive.core.remove_model("p")
    assert drive.core.kv.by_rank["kv0"].pool.num_free == drive.core.kv.by_rank["kv0"].pool.budget
    drive.core.add_model(model)
    assert answered(drive, "p", PROMPT)[0] == 0


def test_the_oldest_pages_go_first_whatever_their_model_and_the_last_ones_of_a_prompt_before_its_first():
    drive = a_drive(a_model("p"), a_model("q"), num_frames=12)
    answered(drive, "p", PROMPT, max_tokens=1)  # 5 pages, all of them kept
    answered(drive, "q", PROMPT, max_tokens=1)
    answered(drive, "p", [1, 2, 3, 4, 5, 6, 7], max_tokens=5)  # wants 3, and 2 are free
    assert answered(drive, "q", PROMPT, max_tokens=1)[0] == 16
    stats = {model.name: model for model in drive.core.stats(drive.now).models}
    assert stats["q"].prefix_evictions == 0
    assert answered(drive, "p", PROMPT[:13], max_tokens=1)[0] == 12


def test_pages_in_use_are_never_evicted_and_what_is_used_again_is_young_again():
    drive = a_drive(num_frames=12)
    answered(drive, "p", PROMPT, max_tokens=1)
    answered(drive, "p", [7] * 13, max_tokens=1)
    assert answered(drive, "p", PROMPT, max_tokens=1)[0] == 16
    answered(drive, "p", [9] * 15, max_tokens=1)  # 4 pages: 3 free ones and the oldest
    assert answered(drive, "p", PROMPT, max_tokens=1)[0] == 16
    [running] = drive.add("p", PROMPT, 16)
    drive.run(until_s=drive.now + 0.03)
    answered_ids = drive.add("p", [11] * 11, 1)
    drive.run()
    assert {drive.ends[key].finish_reason for key in (running, *answered_ids)} == {FinishReason.LENGTH}


def test_a_floor_keeps_a_models_pages_from_others():
    drive = a_drive(a_model("p"), a_model("q"), num_frames=12)
    drive.core.set_limits(LimitChange(floor_bytes={"p": 4 * FRAME_BYTES}))
    answered(drive, "p", PROMPT[:17], max_tokens=1)  # the first to go, were it not for the floor
    for start in range(4):
        answered(drive, "q", [start] * 29, max_tokens=3)
    assert answered(drive, "p", PROMPT[:17], max_tokens=1)[0] == 16


@pytest.mark.parametrize(
    "change", [LimitChange(budget_bytes=3 * FRAME_BYTES), LimitChange(ceiling_bytes={"p": 3 * FRAME_BYTES})]
)
def test_a_lower_limit_takes_cached_pages_at_once(change):
    drive = a_drive(num_frames=12)
    answered(drive, "p", PROMPT)
    drive.core.set_limits(change)
    pages = drive.core.kv.by_rank["kv0"]
    assert pages.pool.used("p") == 3
    assert answered(drive, "p", PROMPT[:9], max_tokens=2)[0] == 8
    assert pages.pool.used("p") <= 3


def test_a_lower_budget_bounds_all_models_together():
    drive = a_drive(a_model("p"), a_model("q"), num_frames=12)
    for model in "pq":
        answered(drive, model, PROMPT)
    drive.core.set_limits(LimitChange(budget_bytes=6 * FRAME_BYTES))
    pages = drive.core.kv.by_rank["kv0"]
    assert pages.pool.used("p") + pages.pool.used("q") == 6
    assert answered(drive, "q", PROMPT)[0] == 16
    assert pages.pool.used("p") + pages.pool.used("q") <= 6


def test_a33_after_an_overload_cached_pages_are_as_good_as_free():
    drive = a_drive(a_model("p"), a_model("q", page_tokens=8, frames_per_page=2), num_frames=64, max_num_seqs=9)
    ids = [drive.add("p", [index, *range(50)], 9)[0] for index in range(9)]
    drive.cluster.poison[ids[3]] = "prefill"
    drive.run(until_s=0.5)
    for sequence_id in ids:
        drive.end(sequence_id)
    drive.run()
    stats = drive.core.stats(drive.now)
    assert (stats.pools[0].frames_used, stats.pools[0].frames_reserved) == (0, 0)
    assert stats.pools[0].frames_reusable > 40
    sent_s = drive.now
    short = drive.add("p", [1] * 15, 3) + drive.add("q", [1] * 15, 3)
    whole = drive.add("q", [2] * 200, 30)  # 29 pages of 2 frames: nearly the whole pool
    drive.run()
    assert max(drive.first_token_s[sequence_id] for sequence_id in short) < sent_s + 1.0
    assert {drive.ends[sequence_id].finish_reason for sequence_id in short + whole} == {FinishReason.LENGTH}
    assert drive.core.stats(drive.now).models[0].prefix_evictions > 0
    drive.check_all_ended()


def test_the_numbers_add_up():
    drive = a_drive(num_frames=16)
    for _ in range(3):
        answered(drive, "p", PROMPT)
    answered(drive, "p", [9] * 50)
    (model,) = drive.core.stats(drive.now).models
    assert (model.prefix_queries, model.prefix_hits) == (3 * 20 + 50, 2 * 16)
    assert model.pages_reusable == 5 + 13 - model.prefix_evictions
    assert model.pages_reusable + drive.core.stats(drive.now).pools[0].frames_free == 16
