"""Each order policy picks by what its name says, whatever the order in which it is shown the segments."""

from __future__ import annotations

from itertools import permutations

import pytest

from crosspool.scheduler.order import ORDER_POLICIES, Segment

READY = (
    Segment(lane=0, priority=1, ticket=5),
    Segment(lane=1, priority=1, ticket=3),
    Segment(lane=2, priority=0, ticket=9),
    Segment(lane=3, priority=0, ticket=7),
)


@pytest.mark.parametrize(("policy", "lane"), [("none", 0), ("ticket", 1), ("priority", 3)])
def test_a_policy_picks_by_its_own_measure(policy: str, lane: int) -> None:
    assert {ORDER_POLICIES[policy](shown).lane for shown in permutations(READY)} == {lane}


def test_there_is_a_case_for_every_policy() -> None:
    assert set(ORDER_POLICIES) == {"none", "ticket", "priority"}
