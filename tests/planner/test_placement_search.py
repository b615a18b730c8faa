"""Local search: never worse than where it starts, always within the room, the same every time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crosspool.planner.placement_search import Item, first_grouping, objective, search


def random_items(seed, num, num_groups):
    rng = np.random.default_rng(seed)
    traffic = rng.random(num)
    return [
        Item(
            ffn=float(rng.uniform(0.2, 1.0)) * num_groups / num,
            kv=float(rng.uniform(0.1, 1.0)) * num_groups / num,
            times=(float(rng.random()), float(rng.random())),
            share=float(num_groups * traffic[idx] / traffic.sum()),
        )
        for idx in range(num)
    ]


@given(seed=st.integers(0, 10_000), num=st.integers(2, 24), num_groups=st.integers(2, 5))
def test_search_stays_within_the_room_and_never_gets_worse(seed, num, num_groups):
    items = random_items(seed, num, num_groups)
    first = first_grouping(items, num_groups)
    found = search(items, num_groups, 1.0)
    if first is None:
        assert found is None
        return
    assert found is not None
    assert objective(items, found, num_groups, 1.0) <= objective(items, first, num_groups, 1.0) + 1e-9
    for group in range(num_groups):
        members = [items[idx] for idx, chosen in enumerate(found) if chosen == group]
        assert sum(item.ffn for item in members) <= 1 + 1e-9
        assert sum(item.kv for item in members) <= 1 + 1e-9
    assert search(items, num_groups, 1.0) == found


def test_search_swaps_a_misplaced_pair_where_a_move_has_no_room():
    items = [Item(ffn=0.25, kv=0.1, times=(idx // 4, idx // 4), share=0.25) for idx in range(8)]
    start = [0, 0, 0, 1, 0, 1, 1, 1]
    found = search(items, 2, 1.0, start)
    assert found is not None
    assert objective(items, start, 2, 1.0) == 5.0
    assert objective(items, found, 2, 1.0) == 1.0
    assert found == [0, 0, 0, 0, 1, 1, 1, 1]
