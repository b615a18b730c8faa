"""Places for whole models: one for each while there is room, then turns; nothing that a chunk reads is taken away."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.prefill_rank.places import Places  # noqa: E402

pytestmark = pytest.mark.judge


def places(room: int, settled: list[int] | None = None) -> Places:
    def settle() -> None:
        if settled is not None:
            settled.append(1)

    return Places("p0", room, lambda size: torch.zeros(size, dtype=torch.uint8), settle)


def take(found: Places, model: str, size: int) -> bool:
    """Take and release at once; whether it lay there already."""
    place, is_in_place = found.take(model, size)
    found.release(place)
    return is_in_place


def test_models_that_fit_together_stay_in_place():
    found = places(100)
    for model, size in (("a", 40), ("b", 60)):
        assert found.make_room(model, size)
    assert [take(found, model, size) for model, size in (("a", 40), ("b", 60)) * 2] == [False, False, True, True]
    assert set(found.models()) == {"a", "b"}
    assert found.num_bytes == 100


def test_of_more_models_the_one_used_longest_ago_leaves_and_a_larger_place_takes_the_smallest_ones_memory():
    settled: list[int] = []
    found = places(130, settled)
    for model, size in (("small", 30), ("a", 60), ("b", 60)):
        assert found.make_room(model, size)
    assert found.num_bytes == 120
    assert len(settled) == 1, "copies are over before memory goes"
    assert [take(found, *each) for each in (("a", 60), ("b", 60), ("small", 30), ("b", 60), ("a", 60))] == [
        False, False, False, True, False,
    ]  # fmt: skip
    assert set(found.models()) == {"a", "b"}


def test_a_busy_place_is_neither_taken_nor_dropped_nor_spare():
    found = places(100)
    assert found.make_room("a", 60)
    busy, _ = found.take("a", 60)
    assert not found.make_room("big", 90), "asked again once the chunk has ended"
    assert found.spare("b", 60) is None
    found.release(busy)
    assert found.make_room("big", 90)
    assert found.models() == ()


def test_of_free_places_the_smallest_that_fits_is_taken():
    found = places(100)
    assert found.make_room("big", 60)
    assert found.make_room("small", 30)
    small, _ = found.take("small", 30)
    assert small.num_bytes == 30


def test_a_spare_place_is_for_a_model_that_is_not_in_place():
    found = places(120)
    for model in "ab":
        assert found.make_room(model, 60)
    found.take("a", 60)
    assert found.spare("a", 60) is None
    spare = found.spare("b", 60)
    assert spare is not None
    assert not spare.is_busy
    assert take(found, "b", 60)
    found.forget("b")
    assert found.models() == ("a",)


def test_a_model_beyond_all_room_is_refused():
    with pytest.raises(ValueError, match=r"p0: a takes 0\.0 GiB whole and prefill_pool_bytes is 0\.0 GiB; set"):
        places(10).make_room("a", 11)


def test_what_is_kept_of_a_model_goes_with_its_place():
    class Kept:
        """Something that a weak reference can point to."""

    found = places(100)
    assert found.make_room("a", 60)
    place, _ = found.take("a", 60)
    place.held = Kept()
    found.release(place)
    kept = weakref.ref(place.held)
    del place
    assert found.make_room("b", 90)
    assert kept() is None, "memory that is still reached is not free"
