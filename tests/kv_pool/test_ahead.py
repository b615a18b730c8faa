"""Mapping ahead of need: watermarks, idle models' pages by age, and frames for whoever needs them now."""

from __future__ import annotations

from crosspool.kv_pool.ahead import AheadOfNeed, Hint, MappingHint, MemoryHint
from crosspool.kv_pool.pool import KVPool


def a_pool(num_frames: int = 20) -> KVPool:
    pool = KVPool(num_frames + 1)
    pool.add_model("p", 1)
    pool.add_model("q", 2)
    return pool


def expected(hints: list[Hint]) -> dict[str, int]:
    return {hint.model: len(hint.expected) for hint in hints if isinstance(hint, MappingHint) and hint.expected}


def given_back(hints: list[Hint]) -> dict[str, int]:
    found: dict[str, int] = {}
    for hint in hints:
        if isinstance(hint, MappingHint) and hint.given_back:
            found[hint.model] = found.get(hint.model, 0) + len(hint.given_back)
    return found


def test_every_live_sequence_finds_a_page_and_shelves_are_filled_before_they_are_empty():
    pool = a_pool()
    ahead = AheadOfNeed(pool)
    assert expected(ahead.hints({"p": 3, "q": 0}, 0.0)) == {"p": 6}
    assert pool.num_shelved("p") == 6
    assert ahead.hints({"p": 3, "q": 0}, 0.0) == []
    pool.allocate("p", 3)
    assert ahead.hints({"p": 3, "q": 0}, 0.0) == [], "three are left, one for each sequence"
    pool.allocate("p", 1)
    assert expected(ahead.hints({"p": 3, "q": 0}, 0.0)) == {"p": 4}


def test_what_is_hinted_is_what_the_model_gets():
    pool = a_pool()
    (hint,) = AheadOfNeed(pool).hints({"p": 0, "q": 2}, 0.0)
    pages = pool.allocate("q", 4)
    assert set(pages) == set(hint.expected)
    assert pool.num_free == 12


def test_frames_on_shelves_are_free_for_every_model():
    pool = a_pool(10)
    AheadOfNeed(pool).hints({"p": 5, "q": 0}, 0.0)
    assert pool.num_shelved("p") == 10
    assert pool.num_free == 10
    assert len(pool.allocate("q", 5)) == 5
    assert pool.num_free == 0


def test_pages_that_were_taken_apart_are_given_back():
    pool = a_pool(10)
    ahead = AheadOfNeed(pool)
    ahead.hints({"p": 5, "q": 0}, 0.0)
    pool.allocate("q", 1)
    assert given_back(ahead.hints({"p": 5, "q": 0}, 0.0)) == {"p": 10}


def test_an_idle_models_pages_are_taken_back_by_age():
    pool = a_pool()
    ahead = AheadOfNeed(pool, idle_s=2.0)
    pool.free("p", pool.allocate("p", 4))
    assert ahead.hints({"p": 0, "q": 0}, 10.0) == []
    assert ahead.next_moment() == 12.0
    assert ahead.hints({"p": 0, "q": 0}, 11.9) == []
    assert given_back(ahead.hints({"p": 0, "q": 0}, 12.0)) == {"p": 4}
    assert ahead.next_moment() is None
    assert pool.num_loose == 20


def test_a_model_that_is_called_again_starts_its_age_anew():
    pool = a_pool()
    ahead = AheadOfNeed(pool, idle_s=2.0)
    pool.free("p", pool.allocate("p", 4))
    ahead.hints({"p": 0, "q": 0}, 0.0)
    ahead.hints({"p": 1, "q": 0}, 1.0)
    ahead.hints({"p": 0, "q": 0}, 1.5)
    assert ahead.hints({"p": 0, "q": 0}, 3.0) == []


def test_under_pressure_the_model_idle_for_longest_gives_first_and_no_more_than_is_needed():
    pool = KVPool(13)
    for model in ("old", "young", "busy"):
        pool.add_model(model, 1)
    ahead = AheadOfNeed(pool, idle_s=100.0)
    kept = {model: pool.allocate(model, 6) for model in ("old", "young")}
    pool.free("old", kept["old"])
    assert given_back(ahead.hints({"old": 0, "young": 1, "busy": 0}, 0.0)) == {"old": 2}
    pool.free("young", kept["young"])
    ahead.hints({"old": 0, "young": 0, "busy": 0}, 1.0)
    hints = ahead.hints({"old": 0, "young": 0, "busy": 4}, 2.0)
    assert given_back(hints) == {"old": 4, "young": 4}
    assert expected(hints) == {"busy": 8}


def test_a_removed_model_leaves_nothing_behind():
    pool = a_pool()
    ahead = AheadOfNeed(pool, idle_s=2.0)
    pool.free("q", pool.allocate("q", 3))
    ahead.hints({"p": 0, "q": 0}, 0.0)
    pool.remove_model("q")
    assert ahead.hints({"p": 0}, 10.0) == []
    assert pool.num_loose == 20


def memory(hints: list[Hint]) -> tuple[int, int]:
    """Frames withdrawn and restored."""
    found = [hint for hint in hints if isinstance(hint, MemoryHint)]
    return sum(len(hint.withdrawn) for hint in found), sum(len(hint.restored) for hint in found)


def test_frames_beyond_the_limits_go_as_they_come_free_and_are_back_at_once():
    pool = a_pool()
    ahead = AheadOfNeed(pool)
    held = pool.allocate("p", 15)
    ahead.leave_unused(8, is_settling=False)
    assert memory(ahead.hints({"p": 0, "q": 0}, 0.0)) == (5, 0)
    pool.free("p", held[:6])
    assert memory(ahead.hints({"p": 0, "q": 0}, 0.0)) == (3, 0)
    assert pool.num_free == 3
    ahead.leave_unused(0, is_settling=False)
    assert pool.num_free == 11, "before the worker is told"
    assert memory(ahead.hints({"p": 0, "q": 0}, 0.0)) == (0, 8)
    assert memory(ahead.hints({"p": 0, "q": 0}, 0.0)) == (0, 0)


def test_while_limits_settle_all_memory_stays():
    pool = a_pool()
    ahead = AheadOfNeed(pool)
    ahead.leave_unused(5, is_settling=False)
    ahead.hints({"p": 0, "q": 0}, 0.0)
    ahead.leave_unused(9, is_settling=True)
    assert pool.num_free == 20
    assert memory(ahead.hints({"p": 0, "q": 0}, 0.0, may_withdraw=False)) == (0, 5)
    assert memory(ahead.hints({"p": 0, "q": 0}, 0.0)) == (9, 0)


def test_a_worker_that_started_anew_is_told_again_what_it_need_not_have():
    pool = a_pool()
    ahead = AheadOfNeed(pool)
    ahead.leave_unused(5, is_settling=False)
    ahead.hints({"p": 0, "q": 0}, 0.0)
    ahead.started_anew()
    assert memory(ahead.hints({"p": 0, "q": 0}, 0.0)) == (5, 0)
    assert pool.num_withdrawn == 5
