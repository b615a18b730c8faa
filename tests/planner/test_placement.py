"""Grouping: alike stage times together, bytes respected, and the optimum of small cases."""

from __future__ import annotations

from itertools import product
from math import log

import pytest

from crosspool.errors import CapacityError
from crosspool.planner.placement import BALANCE_WEIGHT, Candidate, GroupRoom, place_models
from crosspool.units import GiB

ROOM = GroupRoom(num_kv=1, kv_bytes_per_rank=100 * GiB, num_weights=1, weights_bytes_per_rank=100 * GiB)


def candidate(name, *, ffn=20 * GiB, attention_s=1e-5, ffn_s=1e-5, mean=0.0, variance=0.0, busy=1.0):
    return Candidate(
        name=name,
        ffn_bytes=ffn,
        kv_pool_weight_bytes=GiB,
        mean_bytes=mean,
        variance_bytes=variance,
        attention_s=attention_s,
        ffn_s=ffn_s,
        busy=busy,
    )


def test_models_with_alike_stage_times_share_a_group():
    slow = [candidate(f"slow{idx}", attention_s=9e-5, ffn_s=8e-5) for idx in range(3)]
    fast = [candidate(f"fast{idx}") for idx in range(3)]
    groups, placement = place_models([*slow, *fast], ROOM, 2)
    assert sorted(groups) == [["fast0", "fast1", "fast2"], ["slow0", "slow1", "slow2"]]
    assert placement.gap <= 0.01


def test_bytes_come_before_likeness():
    """Three alike models of 40 GiB do not fit one group of 100; one of them joins the other kind."""
    slow = [candidate(f"slow{idx}", ffn=40 * GiB, attention_s=9e-5) for idx in range(3)]
    groups, _ = place_models([*slow, candidate("fast", ffn=10 * GiB)], ROOM, 2)
    assert sorted(len([name for name in group if name.startswith("slow")]) for group in groups) == [1, 2]


def test_kv_demand_counts_with_its_spread():
    """Each of two models fits beside the other by its mean alone, not with the deviations asked for."""
    pair = [
        candidate("a", mean=45 * GiB, variance=(6 * GiB) ** 2),
        candidate("b", mean=45 * GiB, variance=(6 * GiB) ** 2),
    ]
    groups, _ = place_models(pair, ROOM, 2, deviations=0.0)
    assert sorted(len(group) for group in groups) in ([0, 2], [1, 1])
    groups, _ = place_models(pair, ROOM, 2, deviations=2.33)
    assert sorted(len(group) for group in groups) == [1, 1]


def test_small_cases_reach_the_optimum_of_all_groupings():
    items = [
        candidate("a", ffn=40 * GiB, attention_s=1e-5, ffn_s=4e-5, busy=0.5),
        candidate("b", ffn=35 * GiB, attention_s=5e-5, ffn_s=1e-5, busy=0.2),
        candidate("c", ffn=30 * GiB, attention_s=2e-5, ffn_s=3e-5, busy=0.1),
        candidate("d", ffn=25 * GiB, attention_s=6e-5, ffn_s=2e-5, busy=0.9),
        candidate("e", ffn=20 * GiB, attention_s=3e-5, ffn_s=2e-5, busy=0.4),
    ]

    def unit(values):
        logs = [log(value) for value in values]
        return [(value - min(logs)) / (max(logs) - min(logs)) for value in logs]

    attention, ffn = unit([item.attention_s for item in items]), unit([item.ffn_s for item in items])
    total_busy = sum(item.busy for item in items)

    def objective(assignment):
        value, largest = 0.0, 0.0
        for group in (0, 1):
            members = [idx for idx, chosen in enumerate(assignment) if chosen == group]
            if sum(items[idx].ffn_bytes for idx in members) > 100 * GiB:
                return float("inf")
            for times in (attention, ffn):
                inside = [times[idx] for idx in members]
                value += max(inside) - min(inside) if inside else 0.0
            largest = max(largest, 2 * sum(items[idx].busy for idx in members) / total_busy)
        return value + BALANCE_WEIGHT * largest

    best = min(objective(assignment) for assignment in product((0, 1), repeat=5))
    groups, placement = place_models(items, ROOM, 2)
    found = objective([0 if item.name in groups[0] else 1 for item in items])
    assert found == pytest.approx(best, rel=0.011)
    assert placement.objective == pytest.approx(found, rel=1e-6)


def test_what_fits_no_group_is_refused_with_the_numbers():
    with pytest.raises(
        CapacityError, match=r"big needs 120\.0 GiB of FFN; a group of 1 weights GPUs offers 100\.0 GiB"
    ):
        place_models([candidate("big", ffn=120 * GiB), candidate("small")], ROOM, 2)
    many = [candidate(f"m{idx}", ffn=60 * GiB) for idx in range(5)]
    with pytest.raises(CapacityError, match=r"5 models need 300\.0 GiB of FFN; 2 groups offer 200\.0 GiB"):
        place_models(many, ROOM, 2)
    three = [candidate(f"m{idx}", ffn=60 * GiB) for idx in range(3)]  # 180 of 200 GiB, but two never share a group
    with pytest.raises(CapacityError, match="3 models do not fit 2 groups"):
        place_models(three, ROOM, 2)


def test_one_group_needs_no_solver():
    groups, placement = place_models([candidate("a")], ROOM, 1)
    assert groups == [["a"]]
    assert placement.method == "one group"
