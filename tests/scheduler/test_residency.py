"""A prefill rank's order: no prompt starves, and switches take a bounded share of an overloaded rank's time."""

from __future__ import annotations

import random

import pytest

from crosspool.scheduler.residency import PATIENCE, SWITCH_BYTES_PER_S, Residency, WaitingModel

SECOND = SWITCH_BYTES_PER_S
"""Bytes that take a second to bring in."""


def waiting_model(name, since_s, switch_s):
    return WaitingModel(name, since_s, switch_s * SECOND)


def test_the_model_in_place_keeps_the_rank_until_another_has_waited_several_switches_longer():
    residency = Residency(patience=4.0)
    residency.take("a", SECOND)
    for wait_s, first in ((3.9, "a"), (4.1, "b")):
        waiting = [waiting_model("a", 10.0, 1.0), waiting_model("b", 10.0 - wait_s, 1.0)]
        assert residency.order(waiting, 20.0)[0] == first


def test_an_empty_rank_takes_the_oldest_prompt_and_a_cheap_switch_comes_before_an_equal_dear_one():
    residency = Residency()
    waiting = [waiting_model("dear", 5.0, 2.0), waiting_model("cheap", 5.0, 1.0)]
    assert residency.order(waiting, 9.0) == ["cheap", "dear"]
    assert residency.order([waiting_model("new", 8.0, 1.0), waiting_model("old", 1.0, 1.0)], 9.0) == ["old", "new"]


def test_at_a_tie_the_model_in_place_stays():
    residency = Residency(patience=0.0)
    residency.take("b", SECOND)
    assert residency.order([waiting_model("a", 1.0, 1.0), waiting_model("b", 1.0, 1.0)], 2.0) == ["b", "a"]


def test_a_model_that_is_gone_is_no_longer_in_place():
    residency = Residency()
    residency.take("a", SECOND)
    residency.forget("b")
    assert residency.resident == "a"
    residency.forget("a")
    assert residency.resident is None
    residency.take("a", SECOND)
    assert residency.num_switches == 2
    residency.lost()
    residency.take("a", SECOND)
    assert residency.num_switches == 3, "a rank that was lost has nothing in place"


def test_between_models_that_are_in_place_at_once_the_oldest_prompt_comes_first():
    residency = Residency(patience=4.0, room_bytes=2.5 * SECOND)
    for name in "abc":
        residency.take(name, SECOND)
    assert residency.num_switches == 3
    waiting = [WaitingModel("a", 1.0, SECOND), WaitingModel("b", 4.0, SECOND), WaitingModel("c", 4.5, SECOND)]
    assert residency.order(waiting, 5.0) == ["b", "c", "a"], "a had to leave for c"
    residency.take("b", SECOND)
    residency.take("c", SECOND)
    assert residency.num_switches == 3
    assert residency.order(waiting, 9.1)[0] == "b"
    residency.take("a", SECOND)
    assert residency.order(waiting, 9.1) == ["a", "c", "b"], "b was used longest ago"


def simulate(rates, switch_s, work_s, seconds, patience, seed):
    """Poisson arrivals; returns (share of busy time that switches took, longest wait, prompts served by model)."""
    rng = random.Random(seed)
    arrivals = sorted((moment, name) for name, rate in rates.items() for moment in poisson(rng, rate, seconds))
    queues = {name: [] for name in rates}
    residency, now, place, switching, working, longest = Residency(patience), 0.0, 0, 0.0, 0.0, 0.0
    served = dict.fromkeys(rates, 0)
    while now < seconds:
        while place < len(arrivals) and arrivals[place][0] <= now:
            queues[arrivals[place][1]].append(arrivals[place][0])
            place += 1
        waiting = [waiting_model(name, queue[0], switch_s) for name, queue in queues.items() if queue]
        if not waiting:
            now = arrivals[place][0] if place < len(arrivals) else seconds
            continue
        name = residency.order(waiting, now)[0]
        if name != residency.resident:
            now, switching = now + switch_s, switching + switch_s
        residency.take(name, switch_s * SECOND)
        longest = max(longest, now - queues[name].pop(0))
        now, working = now + work_s, working + work_s
        served[name] += 1
    return switching / (switching + working), longest, served


def poisson(rng, rate, seconds):
    moment = rng.expovariate(rate)
    while moment < seconds:
        yield moment
        moment += rng.expovariate(rate)


@pytest.mark.parametrize("seed", range(5))
def test_switches_take_a_bounded_share_of_an_overloaded_rank(seed):
    rates = {"a": 20.0, "b": 20.0, "c": 5.0}
    share, _, served = simulate(rates, switch_s=1.0, work_s=0.05, seconds=200.0, patience=PATIENCE, seed=seed)
    eager, _, _ = simulate(rates, switch_s=1.0, work_s=0.05, seconds=200.0, patience=0.0, seed=seed)
    assert share <= 1 / (PATIENCE + 1)
    assert eager > 0.8, "first come, first served, mostly switches"
    assert min(served.values()) > 100


@pytest.mark.parametrize("seed", range(5))
def test_a_rare_model_beside_a_busy_one_waits_a_few_switches_and_not_for_ever(seed):
    rates = {"busy": 10.0, "rare": 0.05}
    _, longest, served = simulate(rates, switch_s=1.0, work_s=0.05, seconds=400.0, patience=PATIENCE, seed=seed)
    assert served["rare"] > 5
    assert longest < (PATIENCE + 3) * 1.0 + 2.0
