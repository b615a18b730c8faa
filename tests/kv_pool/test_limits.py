"""Limits of the pool: what they leave to each model, and refusals with true numbers."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from crosspool.kv_pool.limits import PoolLimits, PoolSize, check_limits
from crosspool.units import MiB

WIDTHS = {"p": 1, "q": 3}
SIZE = PoolSize(num_frames=20, frame_bytes=2 * MiB, frames_per_page=WIDTHS)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"budget": 21}, r"a budget of 42\.0 MiB is more than the 40\.0 MiB that the KV pool has.*kv_pool_bytes"),
        (
            {"budget": 10, "floors": {"p": 4, "q": 9}},
            r"floors add up to 26\.0 MiB \(p 8\.0 MiB, q 18\.0 MiB\), more than the budget of 20\.0 MiB",
        ),
        ({"budget": 20, "ceilings": {"q": 2}}, r"ceiling of 4\.0 MiB for q is less than one page of it, 6\.0 MiB"),
        ({"budget": 20, "floors": {"q": 6}, "ceilings": {"q": 3}}, r"floor of 12\.0 MiB for q is above its ceiling"),
        ({"budget": 20, "floors": {"p": 18}}, r"36\.0 MiB kept for other models leaves q less than one page of it"),
        ({"budget": 2}, r"a budget of 4\.0 MiB with 0 B kept for other models leaves q less than one page"),
    ],
)
def test_what_cannot_be_held_is_refused_with_the_numbers(limits, message):
    with pytest.raises(ValueError, match=message):
        check_limits(PoolLimits(**limits), SIZE)


def test_what_can_be_held_is_not_refused():
    check_limits(PoolLimits(budget=20), SIZE)
    check_limits(PoolLimits(budget=9, floors={"p": 6, "q": 3}, ceilings={"p": 6, "q": 3}), SIZE)


frames = st.integers(0, 12)


@given(budget=st.integers(1, 20), floors=st.tuples(frames, frames), ceilings=st.tuples(frames, frames), held=frames)
def test_one_model_reaches_what_it_can_hold_beside_the_others_floors(budget, floors, ceilings, held):
    limits = PoolLimits(
        budget=budget, floors=dict(zip("pq", floors, strict=True)), ceilings=dict(zip("pq", ceilings, strict=True))
    )
    assume(sum(floors) <= budget)
    fits = held <= limits.ceiling("p") and limits.charge({"p": held}) <= budget
    assert fits == (held <= limits.reach("p") or (held <= floors[0] and held <= ceilings[0]))


def test_the_unused_part_of_a_floor_counts_as_taken():
    limits = PoolLimits(budget=20, floors={"p": 4, "q": 3})
    assert limits.charge({}) == 7
    assert limits.charge({"p": 1, "other": 2}) == 4 + 3 + 2
    assert limits.charge({"p": 6, "q": 3}) == 9


def test_a_model_that_goes_takes_its_limits_along():
    limits = PoolLimits(budget=20, floors={"p": 4, "q": 3}, ceilings={"p": 9})
    assert limits.without("p") == PoolLimits(budget=20, floors={"q": 3})
    assert limits.reach("q") == 16
    assert limits.without("p").reach("q") == 20
