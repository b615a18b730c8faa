"""The engine over several KV ranks: pages by split, one request over all ranks, lost ranks, nothing starves."""

import contextlib
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosspool.core import FinishReason
from crosspool.engine.limit_change import LimitChange
from crosspool.errors import CapacityError, DeadlineExceededError, QueueFullError, WorkerLostError
from tests.support.core_drive import FRAME_BYTES, Drive, a_config, a_model

THREE = ("kv0", "kv1", "kv2")


def split_model(name, split, ranks=("kv0", "kv1"), **fields):
    return a_model(name, kv_rank=ranks[0], kv_peers=ranks[1:], kv_split=split, **fields)


def drive_of(*models, num_frames=40, ranks=("kv0", "kv1"), seed=0, **config):
    return Drive(a_config(num_frames, kv_ranks=ranks, **config), models, seed=seed)


def held(drive):
    return [pages.num_held for pages in drive.core.kv.by_rank.values()]


@pytest.mark.parametrize(
    ("split", "width", "tokens"), [("tokens", 1, 320), ("tokens", 3, 104), ("heads", 1, 160), ("heads", 3, 52)]
)
def test_one_request_may_take_all_pages_of_all_ranks(split, width, tokens):
    """40 frames a rank, 4 tokens a page: two ranks hold 2 x (40 // width) pages, or each its part of 40 // width."""
    drive = drive_of(split_model("m", split, frames_per_page=width, max_context=4096))
    assert drive.core.context_limit(drive.core.live_models["m"].model) == tokens
    with pytest.raises(CapacityError, match=f"the KV pool holds {tokens} tokens of one sequence"):
        drive.add("m", prompt=tokens - 4, max_tokens=5)
    drive.add("m", prompt=tokens - 5, max_tokens=5)
    most = [0, 0]
    while drive.num_unended:
        drive.turn()
        most = [max(pair) for pair in zip(most, held(drive), strict=True)]
        drive.now = drive.next_moment() or drive.now
    assert min(most) >= 0.95 * 40
    drive.check_all_ended()


def test_under_one_a_request_sees_one_rank():
    drive = drive_of(split_model("m", "one", max_context=4096))
    assert drive.core.context_limit(drive.core.live_models["m"].model) == 160


def test_under_one_sequences_go_to_the_rank_with_most_free_kv_and_decode_side_by_side():
    drive = drive_of(split_model("m", "one"))
    ids = [drive.add("m", prompt=prompt, max_tokens=20)[0] for prompt in (80, 20, 20, 60)]
    homes = [drive.core._sequences[sequence_id].kv_rank for sequence_id in ids]
    assert homes == ["kv0", "kv1", "kv1", "kv1"]  # 25 frames; 10; 10, 20 beside 25; 20 beside 25 and 20
    drive.run()
    drive.check_all_ended()
    decodes = [step.header for step in drive.cluster.steps if step.header.phase == "decode"]
    assert {header.kv_rank for header in decodes} == {"kv0", "kv1"}
    assert {header.lane for header in decodes} == {0, 1}


def test_under_one_a_prefix_draws_a_sequence_to_its_rank():
    drive = drive_of(split_model("m", "one"), a_model("b"))
    [first] = drive.add("m", prompt=30, max_tokens=4)  # on kv0
    drive.run()
    drive.add("b", prompt=30, max_tokens=4)  # now kv1 has more free KV
    request = drive.requests[first]
    again = replace(request, request_id="again", arrival_s=drive.now, output_token_ids=[])
    [same] = drive.core.add_requests([again], drive.now)
    drive.requests[same], drive.tokens[same] = again, []
    [other] = drive.add("m", prompt=30, max_tokens=4)
    assert [drive.core._sequences[key].kv_rank for key in (same, other)] == ["kv0", "kv1"]
    drive.run()
    drive.check_all_ended()
    assert drive.core.stats(drive.now).models[0].prefix_hits == 28


@pytest.mark.parametrize("split", ["tokens", "heads"])
def test_a_split_model_uses_prefixes_that_others_left_or_still_have(split):
    drive = drive_of(split_model("m", split, ranks=THREE, frames_per_page=2), ranks=THREE)
    prompt = list(range(30))  # 7 whole pages and a part of one
    drive.add("m", prompt, max_tokens=4)
    drive.run()
    recount(drive, 40)
    drive.add("m", prompt, max_tokens=12)
    drive.add("m", [*prompt[:17], 1, 2, 3], max_tokens=12)
    drive.turn()
    held_together = sum(held(drive))
    recount(drive, 40)
    drive.run()
    drive.check_all_ended()
    parts = 3 if split == "heads" else 1
    assert held_together == parts * 2 * (8 + 1)  # four pages of the third request are the second's
    assert drive.core.stats(drive.now).models[0].prefix_hits == 28 + 16


def test_cached_pages_of_a_split_model_make_room_for_others():
    drive = drive_of(split_model("m", "tokens"), split_model("h", "heads"), a_model("b"))
    for name in "mh":
        drive.add(name, prompt=60, max_tokens=4)
    drive.run()
    drive.add("b", prompt=120, max_tokens=30)  # 38 of kv0's 40 frames
    drive.run()
    drive.check_all_ended()
    recount(drive, 40)
    evictions = {model.name: model.prefix_evictions for model in drive.core.stats(drive.now).models}
    assert evictions["m"] + evictions["h"] > 0


def test_a_rank_that_is_lost_takes_its_cached_pages_with_it():
    drive = drive_of(split_model("m", "tokens"))
    prompt = list(range(30))
    drive.add("m", prompt, max_tokens=4)
    drive.run()
    drive.cluster.lose("kv1", drive.now, 0.1)
    drive.run()
    drive.add("m", prompt, max_tokens=4)
    drive.run()
    drive.check_all_ended()
    recount(drive, 40)
    assert drive.core.stats(drive.now).models[0].prefix_hits == 4  # the first page lies on kv0, the second did not


def test_short_sequences_of_a_spread_model_start_on_all_ranks_in_turn():
    drive = drive_of(split_model("m", "tokens", ranks=THREE), ranks=THREE)
    ids = [drive.add("m", prompt=2, max_tokens=2)[0] for _ in range(6)]
    drive.turn()
    first = [drive.core._sequences[sequence_id].table.pages[0][0] // 41 for sequence_id in ids]
    assert first == [0, 1, 2, 0, 1, 2]
    drive.run()
    drive.check_all_ended()


def test_pages_go_where_there_is_room_when_the_ranks_are_not_equally_free():
    drive = drive_of(split_model("s", "tokens", max_context=4096), a_model("b", max_context=4096))
    drive.add("b", prompt=90, max_tokens=30)  # 30 of kv0's 40 frames
    drive.add("s", prompt=190, max_tokens=10)  # 50 pages: 30 on kv1, then in turns
    drive.turn()
    assert held(drive) == [23 + 9, 39]  # prompts alone so far: 23 pages and 48
    drive.run()
    drive.check_all_ended()


@pytest.mark.parametrize("admission", ["reserve", "forecast"])
def test_a_split_sequence_never_waits_for_a_page(admission):
    models = (split_model("s", "tokens"), split_model("h", "heads", ranks=("kv1", "kv0")), a_model("b"))
    drive = drive_of(*models, admission=admission, forecast_quantile=0.1, max_num_seqs=8)
    for name in "shb":
        for _ in range(40):
            drive.core._estimate.record(name, 2)  # a forecast that is far too low
    for _ in range(8):
        for name in "shb":
            with contextlib.suppress(QueueFullError):
                drive.add(name, prompt=6, max_tokens=40)
    drive.run()
    drive.check_all_ended()
    assert drive.core.stats(drive.now).num_stalls == (0 if admission == "reserve" else drive.core.dispatcher.num_stalls)


def test_floors_and_ceilings_hold_on_every_rank():
    drive = drive_of(split_model("s", "tokens", max_context=4096), split_model("t", "heads"))
    change = LimitChange(floor_bytes={"t": 10 * FRAME_BYTES}, ceiling_bytes={"s": 25 * FRAME_BYTES})
    drive.core.set_limits(change)
    assert [pages.limits.floor("t") for pages in drive.core.kv.by_rank.values()] == [10, 10]
    drive.add("s", prompt=190, max_tokens=10)  # 25 pages on each rank
    with pytest.raises(CapacityError):
        drive.add("s", prompt=196, max_tokens=10)
    drive.add("t", prompt=30, max_tokens=10)
    drive.turn()
    assert drive.core.stats(drive.now).models[1].num_prefilling == 1
    drive.run()
    drive.check_all_ended()


def lose_and_check(drive, rank, *, back_in_s):
    drive.run(until_s=0.03)
    drive.cluster.lose(rank, drive.now, back_in_s)
    drive.run()
    drive.check_all_ended()
    assert all(end.error is None for end in drive.ends.values())


@pytest.mark.parametrize("rank", ["kv0", "kv1"])
@pytest.mark.parametrize("split", ["tokens", "heads"])
def test_a_lost_rank_of_a_split_model_takes_all_its_sequences_back_to_their_queue(split, rank):
    drive = drive_of(split_model("m", split), a_model("b", kv_rank="kv0"))
    for _ in range(3):
        drive.add("m", prompt=10, max_tokens=12)
    drive.add("b", prompt=10, max_tokens=12)
    lose_and_check(drive, rank, back_in_s=0.2)
    preempted = {model.name: model.num_preempted for model in drive.core.stats(drive.now).models}
    assert preempted == {"m": 3, "b": 1 if rank == "kv0" else 0}


def test_under_one_sequences_of_a_lost_rank_go_on_at_once_on_another():
    drive = drive_of(split_model("m", "one"))
    for _ in range(4):
        drive.add("m", prompt=10, max_tokens=12)
    lose_and_check(drive, "kv1", back_in_s=None)  # it never comes back
    assert drive.core.stats(drive.now).models[0].num_preempted == 2
    drive.add("m")
    drive.run()
    drive.check_all_ended()


def test_under_one_the_loss_of_all_ranks_ends_requests_after_the_bound():
    drive = drive_of(split_model("m", "one"), recovery_timeout_s=1.0)
    drive.add("m", prompt=10, max_tokens=140)
    drive.run(until_s=0.03)
    drive.cluster.lose("kv0", drive.now, None)
    drive.run(until_s=0.5)
    drive.cluster.lose("kv1", drive.now, None)
    drive.run()
    assert [type(end.error) for end in drive.ends.values()] == [WorkerLostError]
    with pytest.raises(WorkerLostError):
        drive.add("m")


MODELS = [
    split_model("t", "tokens", ranks=THREE, page_tokens=4, frames_per_page=2, max_context=96),
    split_model("u", "tokens", ranks=("kv1", "kv2", "kv0"), page_tokens=3, max_context=64, weights_ranks=("w0", "w1")),
    split_model("h", "heads", ranks=("kv2", "kv0", "kv1"), page_tokens=4, max_context=64, weights_ranks=("w1",)),
    split_model("o", "one", ranks=THREE, page_tokens=8, frames_per_page=3, max_context=96),
    split_model("p", "tokens", ranks=("kv0", "kv1"), page_tokens=8, max_context=96),
    a_model("b", page_tokens=4, max_context=64, kv_rank="kv1"),
]


def recount(drive, num_frames):
    """Every rank's pool, cache and budget against the block tables of live sequences: each frame has its reason."""
    live = [s for m in drive.core.live_models.values() for s in (*m.live_sequences(), *m.lingering.values())]
    for number, pages in enumerate(drive.core.kv.by_rank.values()):
        parts = {}  # of each sequence on this rank
        for sequence in live:
            own = (tuple(f for f in page if f // (num_frames + 1) == number) for page in sequence.table.pages)
            parts[sequence.sequence_id] = [part for part in own if part]
        holders = Counter(part for own in parts.values() for part in own)
        used = sum(len(part) for part in holders)
        reusable = 0 if pages.prefix is None else pages.prefix.num_reusable
        assert pages.pool.budget - pages.pool.num_free == used + reusable
        assert pages.num_held == used
        for sequence in live:
            if sequence.sequence_id in pages.budget.claims:
                alone = sum(len(part) for part in parts[sequence.sequence_id] if holders[part] == 1)
                aside = pages.aside.of([sequence.sequence_id])
                assert pages.budget.claims[sequence.sequence_id].held - aside == alone
            else:
                assert not parts[sequence.sequence_id]
        shared = sum(claim.held for claim in pages.budget.claims.values() if claim.is_shared)
        assert shared == sum(len(part) for part, count in holders.items() if count > 1)


def prompt_of(rng, told):
    """A prompt that begins as an earlier conversation did, up to anywhere in it."""
    earlier = rng.choice(told)
    return [*earlier[: rng.randint(0, len(earlier))], *rng.choices(range(2), k=rng.randint(1, 12))][:40]


def change_limits(drive, rng, num_frames):
    """A new budget of each rank and a new floor and ceiling of one model; queued requests that no longer fit end."""
    name = rng.choice(MODELS).name
    ceiling = rng.choice((None, rng.randint(8, num_frames)))
    change = LimitChange(
        budget_bytes=rng.randint(num_frames // 2, num_frames) * FRAME_BYTES,
        floor_bytes={name: rng.choice((0, rng.randint(0, 10))) * FRAME_BYTES},
        ceiling_bytes={name: None if ceiling is None else ceiling * FRAME_BYTES},
    )
    drive.core.set_limits(change)
    drive._take(drive.core.refuse_unfitting(drive.now))


@pytest.mark.fuzz
@settings(max_examples=settings.default.max_examples // 4)
@given(
    seed=st.integers(0, 10**6),
    admission=st.sampled_from(["reserve", "forecast"]),
    fail_rate=st.sampled_from([0.0, 0.05]),
    num_losses=st.integers(0, 4),
    num_frames=st.sampled_from([36, 64, 200]),
    is_ahead=st.booleans(),
    changes_limits=st.booleans(),
)
def test_every_accepted_request_ends_with_the_tokens_of_an_undisturbed_run(
    seed, admission, fail_rate, num_losses, num_frames, is_ahead, changes_limits
):
    rng = random.Random(seed)
    config = a_config(
        num_frames,
        kv_ranks=THREE,
        admission=admission,
        max_queue=6,
        max_num_seqs=rng.randint(1, 6),
        num_decode_lanes=rng.randint(1, 3),
        num_prefill_lanes=rng.randint(1, 2),
        ageing_s=rng.choice((0.0, 0.05, 2.0)),
        bypass_window=rng.choice((0, 3)),
        forecast_quantile=0.5,
    )
    drive = Drive(config, MODELS, seed=seed, fail_rate=fail_rate, is_ahead=is_ahead)
    for model in MODELS:
        for length in rng.choices(range(1, 8), k=40):
            drive.core._estimate.record(model.name, length)
    told = {model.name: [[]] for model in MODELS}
    for _ in range(rng.randint(3, 12)):
        for _ in range(rng.randint(0, 4)):
            with contextlib.suppress(CapacityError, QueueFullError, WorkerLostError):
                name = rng.choice(MODELS).name
                prompt = prompt_of(rng, told[name])
                ids = drive.add(
                    name,
                    prompt,
                    max_tokens=rng.randint(1, 30),
                    n=rng.choice((1, 1, 1, 3)),
                    stops=rng.sample(range(64), 3),
                    deadline_s=drive.now + rng.uniform(0.0, 2.0) if rng.random() < 0.2 else None,
                    cache_salt=rng.choice((None, None, "s")),
                )
                told[name] += [[*prompt, *drive.expected(sequence_id)] for sequence_id in ids]
        running = [sequence_id for sequence_id in drive.requests if sequence_id not in drive.ends]
        if running and rng.random() < 0.2:
            drive.end(rng.choice(running), rng.choice((FinishReason.ABORT, FinishReason.STOP)))
        if changes_limits and rng.random() < 0.3:
            with contextlib.suppress(ValueError):  # limits that cannot be held
                change_limits(drive, rng, num_frames)
        if num_losses and rng.random() < 0.2:
            num_losses -= 1
            up = [rank for rank in (*THREE, "w0", "w1") if rank not in drive.cluster.down]
            if up:
                drive.cluster.lose(rng.choice(up), drive.now, rng.uniform(0.0, 0.5))
        drive.run(until_s=drive.now + rng.uniform(0.0, 0.1))
        recount(drive, num_frames)
    drive.run()
    drive.check_all_ended()
    recount(drive, num_frames)
    allowed = (DeadlineExceededError, CapacityError) if changes_limits else (DeadlineExceededError,)
    for end in drive.ends.values():
        assert end.error is None or isinstance(end.error, allowed), end.error
