"""Budget, floors and ceilings in the core and the engine: enforced at admission, changed while requests live."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosspool.core import FinishReason
from crosspool.engine.limit_change import LimitChange
from crosspool.errors import CapacityError, UnknownModelError
from tests.support.core_drive import FRAME_BYTES, Drive, a_config, a_model

P = a_model("p", page_tokens=4, frames_per_page=1)
Q = a_model("q", page_tokens=4, frames_per_page=2)


def frames(count: int) -> int:
    return count * FRAME_BYTES


def limited(drive: Drive, **changes: object) -> None:
    """Change limits, then what the engine does next: end what can no longer fit."""
    drive.core.set_limits(LimitChange(**changes))
    drive._take(drive.core.refuse_unfitting(drive.now))


def held(drive: Drive) -> dict[str, int]:
    return {model.name: model.frames_used for model in drive.core.stats(drive.now).models}


def test_a_models_own_limits_come_with_it_and_go_with_it():
    floored = replace(P, kv_floor_bytes=frames(3) - 1, kv_ceiling_bytes=frames(9) + 1)
    drive = Drive(a_config(20), [floored, Q])
    stats = {model.name: model for model in drive.core.stats(0.0).models}
    assert (stats["p"].frames_floor, stats["p"].frames_ceiling, stats["p"].frames_reach) == (3, 9, 9)
    assert (stats["q"].frames_floor, stats["q"].frames_ceiling, stats["q"].frames_reach) == (0, None, 17)
    assert drive.core.context_limit(Q) == 8 * 4
    drive.core.remove_model("p")
    assert drive.core.context_limit(Q) == 10 * 4


def test_limits_that_cannot_be_held_change_nothing():
    drive = Drive(a_config(20), [P, Q])
    before = drive.core.stats(0.0)
    for change, message in [
        ({"budget_bytes": frames(21)}, "more than the 80.0 KiB that the KV pool has"),
        ({"floor_bytes": {"p": frames(12), "q": frames(10)}}, "floors add up to 88.0 KiB"),
        ({"ceiling_bytes": {"q": frames(1)}}, "ceiling of 0 B for q is less than one page of it, 8.0 KiB"),
        ({"floor_bytes": {"p": frames(19)}}, "leaves q less than one page"),
    ]:
        with pytest.raises(ValueError, match=message):
            drive.core.set_limits(LimitChange(**change))
    with pytest.raises(ValueError, match="the floor of p is -1 bytes"):
        LimitChange(floor_bytes={"p": -1})
    with pytest.raises(UnknownModelError, match="served models: p, q"):
        drive.core.set_limits(LimitChange(floor_bytes={"p": frames(1), "nobody": frames(1)}))
    assert drive.core.stats(0.0) == before


def test_a_flood_of_one_model_leaves_the_other_its_floor():
    drive = Drive(a_config(20, max_num_seqs=30), [P, replace(Q, kv_floor_bytes=frames(8))])
    for _ in range(10):
        drive.add("p", prompt=8, max_tokens=8)  # four frames each
    drive.turn()
    assert held(drive)["p"] <= 12
    assert sum(live.num_live for live in drive.core.live_models.values()) == 3
    (small,) = drive.add("q", prompt=4, max_tokens=12)  # four pages: its floor
    drive.turn()
    assert drive.core.live_models["q"].num_live == 1, "its floor is its own, although an older request of p waits"
    drive.run()
    drive.check_all_ended()
    assert drive.ends[small].finish_reason is FinishReason.LENGTH


def test_a_model_at_its_ceiling_waits_for_itself_and_nobody_waits_for_it():
    drive = Drive(a_config(40, ageing_s=0.0), [replace(P, kv_ceiling_bytes=frames(4)), Q])
    first, second = (drive.add("p", prompt=8, max_tokens=8)[0] for _ in range(2))
    drive.turn()
    drive.add("q", prompt=8, max_tokens=8)
    drive.turn()
    assert drive.core.live_models["p"].num_live == 1
    assert drive.core.live_models["q"].num_live == 1, "the aged request of p is kept out by p alone"
    drive.run()
    drive.check_all_ended()
    assert drive.first_token_s[second] > drive.first_token_s[first]


def test_shrinking_touches_nothing_live_and_ends_what_can_never_fit():
    drive = Drive(a_config(20), [P, Q])
    (live,) = drive.add("p", prompt=20, max_tokens=40)  # fifteen frames
    (waiting,) = drive.add("q", prompt=8, max_tokens=24)  # eight pages: sixteen frames
    drive.turn()
    assert held(drive) == {"p": 5, "q": 0}
    limited(drive, budget_bytes=frames(8))
    assert drive.core.stats(drive.now).pools[0].is_settling
    error = drive.ends[waiting].error
    assert isinstance(error, CapacityError)
    assert "8 prompt tokens + 24 output tokens = 32, but the KV pool holds 16 tokens of one sequence of q" in str(error)
    with pytest.raises(CapacityError, match="holds 16 tokens of one sequence of q"):
        drive.add("q", prompt=8, max_tokens=9)
    (small,) = drive.add("q", prompt=4, max_tokens=4)
    drive.turn()
    assert drive.core.live_models["q"].num_live == 0, "admitted while more than the budget is promised"
    drive.run()
    drive.check_all_ended()
    assert len(drive.tokens[live]) == 40
    assert drive.ends[small].time_s > drive.ends[live].time_s
    assert not drive.core.stats(drive.now).pools[0].is_settling


def test_a_higher_ceiling_lets_the_waiting_in_at_once():
    drive = Drive(a_config(20), [replace(P, kv_ceiling_bytes=frames(4)), Q])
    drive.add("p", prompt=8, max_tokens=8)
    drive.add("p", prompt=8, max_tokens=8)
    drive.turn()
    assert drive.core.live_models["p"].num_live == 1
    limited(drive, ceiling_bytes={"p": None})
    drive.turn()
    assert drive.core.live_models["p"].num_live == 2


@pytest.mark.parametrize("admission", ["reserve", "forecast"])
def test_a31_at_a_fifth_of_the_need_all_requests_end_and_every_model_has_its_floor_at_every_moment(admission):
    """Two hundred requests each, of two models whose floors are a third of the pool, the second a while later."""
    models = [replace(P, kv_floor_bytes=frames(60)), replace(Q, kv_floor_bytes=frames(60))]
    drive = Drive(a_config(180, admission=admission, max_queue=200, max_num_seqs=32, forecast_quantile=0.5), models)
    rng = random.Random(31)
    for name in ("p", "q"):
        for _ in range(200):
            drive.add(name, prompt=rng.randint(3, 9), max_tokens=rng.randint(1, 12))
        drive.run(until_s=drive.now + 0.3)
        assert drive.core.live_models["p"].queue, "the pool is not short"
    while drive.num_unended:
        drive.run(until_s=drive.now + 0.05)
        pages, held_now = drive.core.kv.by_rank["kv0"], held(drive)
        assert pages.limits.charge(held_now) <= 180
        for name, other in (("p", "q"), ("q", "p")):
            if len(drive.core.live_models[name].queue) and drive.core.live_models[name].num_live < 32:
                assert held_now[other] <= 120, f"{other} holds what is kept for {name}"
    drive.check_all_ended()
    assert {end.finish_reason for end in drive.ends.values()} == {FinishReason.LENGTH}


changes = st.fixed_dictionaries(
    {},
    optional={
        "budget_bytes": st.integers(12, 24).map(frames),
        "floor_bytes": st.dictionaries(st.sampled_from("pq"), st.integers(0, 8).map(frames), max_size=2),
        "ceiling_bytes": st.dictionaries(st.sampled_from("pq"), st.none() | st.integers(2, 24).map(frames), max_size=2),
    },
)
moves = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("pq"), st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.just("limit"), changes),
    st.tuples(st.just("wait"), st.floats(0.0, 0.2)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
)


@settings(max_examples=60)
@given(moves=st.lists(moves, max_size=25), admission=st.sampled_from(["reserve", "forecast"]))
def test_whatever_the_limits_become_every_accepted_request_ends(moves, admission):
    """With its tokens, or with the true reason why it can no longer fit: nobody starves and nothing deadlocks."""
    drive = Drive(a_config(24, admission=admission, forecast_quantile=0.5, max_num_seqs=4), [P, Q])
    for name in "pq":
        for length in (1, 2, 3, 4) * 10:
            drive.core._estimate.record(name, length)
    for move in moves:
        match move:
            case ("add", model, prompt, max_tokens):
                with contextlib.suppress(CapacityError):
                    drive.add(model, prompt=prompt, max_tokens=max_tokens)
            case ("limit", change):
                with contextlib.suppress(ValueError):
                    limited(drive, **change)
            case ("wait", seconds):
                drive.run(until_s=drive.now + seconds)
            case ("abort", index):
                live = [sequence_id for sequence_id in drive.requests if sequence_id not in drive.ends]
                if live:
                    drive.end(live[index % len(live)])
        pool = drive.core.stats(drive.now).pools[0]
        if not pool.is_settling:
            limits = drive.core.kv.by_rank["kv0"].limits
            assert limits.charge(held(drive)) <= limits.budget
            assert all(count <= limits.ceiling(name) for name, count in held(drive).items())
    drive.run()
    drive.check_all_ended()
    for end in drive.ends.values():
        assert end.error is None or isinstance(end.error, CapacityError), end.error
    if admission == "reserve":
        assert drive.core.dispatcher.num_stalls == 0


def test_a_lost_kv_rank_ends_what_limits_set_meanwhile_would_never_admit_again():
    """Live sequences keep what they were promised; one that has to be prefilled again asks anew, and nobody waits for
    what cannot come.
    """
    drive = Drive(a_config(64), [a_model("p")])
    [large] = drive.add("p", prompt=60, max_tokens=60)
    [small] = drive.add("p", prompt=10, max_tokens=30)
    drive.run(until_s=0.05)
    limited(drive, budget_bytes=20 * FRAME_BYTES)
    drive.run(until_s=0.1)
    assert not drive.ends, "both go on"
    drive.cluster.lose("kv0", drive.now, back_in_s=0.1)
    drive.run()
    assert isinstance(drive.ends[large].error, CapacityError)
    assert drive.ends[small].error is None
    drive.check_all_ended()
