"""Cached pages that have to make room wait in host memory: found again, lost with their rank, forgotten on request."""

import pytest

from tests.support.core_drive import FRAME_BYTES, Drive, a_config, a_model

LONG, OTHER = [1] * 40, [2] * 40
"""Prompts of ten pages of `p` or `q` each."""


def a_drive(num_frames: int = 12, num_host_frames: int = 64, **options) -> Drive:
    models = [a_model("p"), a_model("q")]
    return Drive(a_config(num_frames, host_budget_bytes=num_host_frames * FRAME_BYTES, **options), models)


def ask(drive: Drive, model: str, prompt: list[int], **options) -> int:
    """Run one request alone; its cached tokens."""
    [sequence_id] = drive.add(model, prompt, 2, **options)
    drive.run()
    assert drive.ends[sequence_id].error is None
    return drive.ends[sequence_id].cached_tokens


def stats(drive: Drive, name: str):
    return next(model for model in drive.core.stats(drive.now).models if model.name == name)


def test_a_prompt_whose_pages_had_to_go_is_not_run_again():
    drive = a_drive()
    assert ask(drive, "p", LONG) == 0
    assert ask(drive, "q", OTHER) == 0  # takes nearly the whole pool
    assert stats(drive, "p").frames_stowed > 0
    assert ask(drive, "p", LONG) == 36  # all but the page with its last token
    assert stats(drive, "p").prefix_brought_back > 0
    (pool,) = drive.core.stats(drive.now).pools
    assert pool.host_frames_used == sum(stats(drive, name).frames_stowed for name in "pq")
    drive.check_all_ended()


def test_without_host_memory_it_is():
    drive = Drive(a_config(12), [a_model("p"), a_model("q")])
    assert [ask(drive, "p", LONG), ask(drive, "q", OTHER)] == [0, 0]
    assert ask(drive, "p", LONG) < 36
    assert drive.core.take_copies() == {}


def test_a_tier_that_holds_less_keeps_the_first_pages():
    drive = a_drive(num_host_frames=5)
    ask(drive, "p", LONG)
    ask(drive, "q", OTHER)
    assert ask(drive, "p", LONG) == 4 * 4 + 4 * (12 - 11)  # four stowed pages behind the one that stayed


def test_conversations_take_turns_by_age():
    drive = a_drive(num_host_frames=30)  # three, and none besides
    prompts = [[number] * 40 for number in (3, 4, 5)]
    for prompt in prompts:
        ask(drive, "p", prompt)
    ask(drive, "q", OTHER)
    found = [ask(drive, "p", prompt) for prompt in reversed(prompts)]
    assert found == [36, 36, 0], "what `q` left took the place of the oldest conversation"


def test_other_salts_find_nothing():
    drive = a_drive()
    ask(drive, "p", LONG, cache_salt="a")
    ask(drive, "q", OTHER)
    assert ask(drive, "p", LONG, cache_salt="b") == 0


def test_a_lost_rank_takes_it_along():
    drive = a_drive()
    ask(drive, "p", LONG)
    ask(drive, "q", OTHER)
    drive.cluster.lose("kv0", drive.now, 0.1)
    drive.run()
    assert stats(drive, "p").frames_stowed == 0
    assert ask(drive, "p", LONG) == 0


def test_a_request_whose_pages_were_brought_back_outlives_the_loss_of_their_rank():
    drive = a_drive()
    ask(drive, "p", LONG)
    ask(drive, "q", OTHER)
    [sequence_id] = drive.add("p", LONG, 5)
    drive.turn()
    drive.cluster.lose("kv0", drive.now, 0.1)
    drive.run()
    assert drive.tokens[sequence_id] == drive.expected(sequence_id)
    drive.check_all_ended()


def test_trimming_a_model_forgets_its_stowed_pages_and_removing_it_too():
    drive = a_drive()
    ask(drive, "p", LONG)
    ask(drive, "q", OTHER)
    drive.core.trim("p")
    assert stats(drive, "p").frames_stowed == 0
    assert ask(drive, "p", LONG) == 0
    ask(drive, "q", [3] * 40)
    assert stats(drive, "p").frames_stowed > 0
    drive.core.remove_model("p")
    drive.core.add_model(a_model("p"))
    assert stats(drive, "p").frames_stowed == 0
    assert ask(drive, "p", LONG) == 0


def test_pages_of_a_model_that_is_split_over_kv_ranks_are_dropped_as_before():
    models = [a_model("p", kv_peers=("kv1",), kv_split="tokens"), a_model("q")]
    config = a_config(8, host_budget_bytes=64 * FRAME_BYTES, kv_ranks=("kv0", "kv1"))
    drive = Drive(config, models)
    ask(drive, "p", LONG)
    ask(drive, "q", [2] * 28)
    assert stats(drive, "p").prefix_evictions > 0
    assert stats(drive, "p").frames_stowed == 0


def test_a_conversation_goes_to_the_kv_rank_that_has_stowed_it():
    models = [a_model("p", kv_peers=("kv1",)), a_model("q", kv_rank="kv0"), a_model("r", kv_rank="kv1")]
    drive = Drive(a_config(12, host_budget_bytes=64 * FRAME_BYTES, kv_ranks=("kv0", "kv1")), models)
    ask(drive, "p", LONG)
    home = next(step.header.kv_rank for step in drive.cluster.steps)
    ask(drive, "q", OTHER)
    ask(drive, "r", OTHER)
    first = len(drive.cluster.steps)
    assert ask(drive, "p", LONG) == 36
    assert drive.cluster.steps[first].header.kv_rank == home


@pytest.mark.parametrize("num_live", [2, 3])
def test_several_at_once_bring_the_same_pages_back_and_share_what_is_there(num_live):
    """They find nothing in the pool, so each has pages of its own until the first has run."""
    drive = a_drive(num_frames=40)
    ask(drive, "p", LONG)
    for number in range(4):
        ask(drive, "q", [10 + number] * 40)
    ids = [drive.add("p", [*LONG, number], 3)[0] for number in range(num_live)]
    drive.run()
    assert all(drive.ends[key].cached_tokens >= 36 for key in ids)
    drive.check_all_ended()


def test_pages_that_another_one_has_filled_meanwhile_take_nothing_away_from_what_was_brought_back():
    drive = a_drive(num_frames=40, batch_invariant=True)  # a step runs one prompt alone
    ask(drive, "p", LONG)
    for number in range(4):
        ask(drive, "q", [10 + number] * 40)
    [first] = drive.add("p", [*LONG[:8], *[7] * 16], 2)  # two pages of it are the other one's too
    [second] = drive.add("p", [*LONG, 8], 2)
    drive.run()
    assert drive.ends[first].cached_tokens == 8
    assert drive.ends[second].cached_tokens == 40
    drive.check_all_ended()
