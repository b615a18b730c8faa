"""Layer-exact and step-level simulation of the same requests agree."""

from __future__ import annotations

import random

import pytest

from crosspool.simulator.exact import simulate_exact
from crosspool.simulator.steps import StepSimulator, simulate_steps
from tests.support.simulating import LinearCost, a_group, requests

COSTS = {
    "a": {"attention": 20, "ffn": 25, "layers": 12},
    "b": {"attention": 15, "ffn": 30, "layers": 10},
    "c": {"attention": 12, "ffn": 35, "layers": 6},
}


def workload(rate, seconds, seed=1, models="abc", prompt=150, output=120):
    rng = random.Random(seed)
    rows = []
    for model in models:
        now = rng.expovariate(rate)
        while now < seconds:
            rows.append((now, model, 1 + int(rng.expovariate(1 / prompt)), 1 + int(rng.expovariate(1 / output))))
            now += rng.expovariate(rate)
    return requests(sorted(rows))


def group(order="priority", models="abc", **config):
    return a_group({name: LinearCost(**COSTS[name]) for name in models}, order=order, **config)


@pytest.mark.parametrize(
    ("rate", "order", "models", "limit"),
    [
        (1.0, "priority", "a", 0.005),
        (3.0, "priority", "ab", 0.02),
        (3.0, "ticket", "abc", 0.02),
        (6.0, "priority", "abc", 0.02),
        (9.0, "priority", "abc", 0.02),
        (3.0, "streams", "abc", 0.02),
    ],
)
def test_mean_tbt_of_the_modes_agrees(rate, order, models, limit):
    work = workload(rate, 6.0, models=models)
    exact = simulate_exact(group(order, models), work)
    steps = simulate_steps(group(order, models), work)
    assert steps.total.num_tokens == exact.total.num_tokens == sum(request.output_tokens for request in work)
    assert steps.total.tbt.count == exact.total.tbt.count
    assert steps.total.tbt.mean == pytest.approx(exact.total.tbt.mean, rel=limit)
    assert steps.num_events < exact.num_events / 4
    for station in (0, 1):
        assert steps.busy_s[station] == pytest.approx(exact.busy_s[station], rel=0.05)
    assert steps.occupancy["kv0"].mean == pytest.approx(exact.occupancy["kv0"].mean, rel=0.05)


def test_lanes_that_are_crowded_now_and_then_lose_no_time_by_it():
    rng = random.Random(2)
    rows = [(0.0, "a", 10, 1500), (0.0, "b", 10, 1500)]
    rows += [(rng.uniform(0.1, 1.1), "c", 16, 4) for _ in range(160)]
    exact, steps = (mode(group("ticket"), requests(sorted(rows))) for mode in (simulate_exact, simulate_steps))
    for name in "ab":
        assert steps.models[name].tbt.mean == pytest.approx(exact.models[name].tbt.mean, rel=0.008)
    assert steps.models["c"].request_tbt.mean == pytest.approx(exact.models["c"].request_tbt.mean, rel=0.03)


def test_a_request_alone_takes_the_same_time_to_the_nanosecond_in_steps_of_equal_cost():
    cost = {"a": LinearCost(token=0.0)}
    exact, steps = (mode(a_group(cost), requests([(0.5, "a", 100, 200)])) for mode in (simulate_exact, simulate_steps))
    prefill, decode = LinearCost(token=0.0), LinearCost(token=0.0)
    first = prefill.base.step_s - prefill.base.tail_s + 1e-9 + 12 * 64 * 0.2e-6  # a chunk of 64 without sampling
    second = prefill.base.step_s + 12 * 36 * 0.2e-6
    each = decode.base.step_s + 12 * 0.2e-6
    for result in (exact, steps):
        assert result.duration_s == pytest.approx(0.5 + first + second + 199 * each, abs=1e-9)
        assert result.total.ttft.mean == pytest.approx(first + second, abs=1e-9)
        assert result.total.tbt.mean == pytest.approx(each, abs=1e-10)
        assert result.num_steps == 2 + 199


def test_runs_of_steps_take_few_events():
    result = simulate_steps(a_group({"a": LinearCost()}), requests([(0.0, "a", 10, 2000)]))
    assert result.num_steps == 2000
    assert result.num_events < 2000 / 16 + 10  # one for each page of 16 tokens


def test_a_full_pool_queues_and_both_modes_say_so():
    work = requests([(0.001 * number, "a", 320, 64) for number in range(12)])
    for mode in (simulate_exact, simulate_steps):
        result = mode(a_group({"a": LinearCost()}, num_frames=60), work)  # two requests at once
        assert result.total.num_finished == 12
        assert result.occupancy["kv0"].peak <= 60
        assert result.total.queueing.quantile(0.95) > 5 * result.total.queueing.quantile(0.1) + 1e-3


def test_refusals_are_counted_by_reason():
    work = requests([(0.0, "a", 2000, 10), (0.1, "a", 1 << 21, 10), *[(0.2, "a", 100, 50)] * 9])
    for mode in (simulate_exact, simulate_steps):
        result = mode(a_group({"a": LinearCost()}, num_frames=60, max_queue=2, max_num_seqs=3), work)
        assert result.total.refused == {"KV pool too small": 1, "context limit": 1, "queue full": 4}
        assert result.total.num_finished == 5
        assert result.num_unfinished == 0


def test_requests_past_their_deadline_are_dropped():
    work = requests([(0.0, "a", 64, 3000), (0.1, "a", 64, 10)])
    for mode in (simulate_exact, simulate_steps):
        result = mode(a_group({"a": LinearCost()}, max_num_seqs=1, default_deadline_s=0.2), work)
        assert result.total.refused == {"deadline passed": 1}
        assert result.total.num_finished == 1


def test_a_stop_leaves_requests_unfinished():
    for mode in (simulate_exact, simulate_steps):
        result = mode(a_group({"a": LinearCost()}), requests([(0.0, "a", 64, 3000)]), stop_s=0.1)
        assert result.duration_s == pytest.approx(0.1)
        assert result.num_unfinished == 1
        assert result.total.num_tokens == pytest.approx(0.1 / (12 * 51.3e-6 + 50e-6), rel=0.05)


def test_ordering_off_is_slower_with_two_equal_lanes():
    cost = {"attention": 20, "ffn": 20, "layers": 12, "tail": 1.0}
    work = requests([(0.0, "a", 10, 400), (0.0, "b", 10, 400)])
    tbt = {
        order: simulate_exact(
            a_group({"a": LinearCost(**cost), "b": LinearCost(**cost)}, order=order, num_prefill_lanes=2), work
        ).total.tbt
        for order in ("ticket", "streams")
    }  # both prompts in lanes of their own, so both models start decoding at the same moment
    assert tbt["streams"].mean > 1.6 * tbt["ticket"].mean


def test_the_same_requests_give_the_same_result():
    work = workload(4.0, 2.0)
    first, second = (StepSimulator(group()).run(work) for _ in range(2))
    assert first.duration_s == second.duration_s
    assert first.total.tbt.total == second.total.tbt.total


def test_host_time_lengthens_every_step():
    from dataclasses import replace

    work = requests([(0.0, "a", 10, 100)])
    plain = a_group({"a": LinearCost()})
    for mode in (simulate_exact, simulate_steps):
        slow, fast = mode(replace(plain, host_s=1e-4), work), mode(plain, work)
        assert slow.total.tbt.mean == pytest.approx(fast.total.tbt.mean + 1e-4, rel=1e-6)


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order 'fifo' is unknown; use one of none, ticket, priority, streams"):
        group(order="fifo")


def test_lanes_that_get_in_each_others_way_are_slower_only_together():
    costs = {name: LinearCost(delay=1.25) for name in "ab"}
    together = requests([(0.0, "a", 10, 200), (0.0, "b", 10, 200)])
    for mode in (simulate_exact, simulate_steps):
        alone = mode(a_group(costs), requests([(0.0, "a", 10, 200)]))
        assert (
            alone.total.tbt.mean == mode(a_group({"a": LinearCost()}), requests([(0.0, "a", 10, 200)])).total.tbt.mean
        )
        free = mode(a_group({name: LinearCost() for name in "ab"}), together)
        assert mode(a_group(costs), together).total.tbt.mean == pytest.approx(1.25 * free.total.tbt.mean, rel=0.02)


def test_steps_ahead_begin_without_the_engine_and_drop_rows_that_have_ended():
    from dataclasses import replace

    rows = [(0.0, "a", 10, 60), (0.0, "a", 10, 40), (0.02, "b", 10, 50), (0.03, "c", 5, 30)]
    work = [
        replace(request, max_tokens=500) for request in requests(rows)
    ]  # nobody knows before which token is the last
    plain = a_group({name: LinearCost() for name in "abc"})
    slow = replace(plain, host_s=1e-3)
    ahead = simulate_exact(replace(slow, is_ahead=True), work)
    assert ahead.total.num_tokens == 180
    assert {name: found.num_finished for name, found in ahead.models.items()} == {"a": 2, "b": 1, "c": 1}
    assert ahead.total.tbt.mean < simulate_exact(slow, work).total.tbt.mean - 0.5e-3
    assert simulate_exact(replace(plain, is_ahead=True), work).num_unfinished == 0


def test_a_prompt_steps_aside_for_as_long_as_its_patience():
    """Two lanes of decode keep the weights pool busy; each of a chunk's segments waits until its patience is out."""
    from dataclasses import replace

    from crosspool.simulator.group import Patience

    costs = {name: LinearCost(attention=5, ffn=60, tail=0) for name in "ab"} | {"p": LinearCost(attention=5, ffn=60)}
    work = requests([(0.0, "a", 10, 900), (0.0, "b", 10, 900), (0.02, "p", 64, 1)])
    ttft = {}
    for patience in (Patience(0.0), Patience(1e-3), Patience(0.36e-3, 1e-5), Patience()):
        found = simulate_exact(replace(a_group(costs, num_decode_lanes=2), patience=patience), work)
        ttft[patience.piece_s] = found.models["p"].ttft.mean
    segments = 12  # of the FFN; attention has its station nearly to itself
    assert ttft[1e-3] - ttft[0.0] == pytest.approx(segments * 1e-3, rel=0.2)
    assert ttft[0.36e-3] == pytest.approx(ttft[1e-3], rel=0.05), "64 tokens of 10 us make up for what is missing"
    assert ttft[float("inf")] > 3 * ttft[1e-3], "after the others have ended"


def test_a_prompt_begins_once_the_decode_steps_under_way_have_ended():
    from dataclasses import replace

    costs = {"a": LinearCost(attention=5, ffn=400, tail=0, row=0), "p": LinearCost(attention=5, ffn=60, row=0)}
    work = requests([(0.0, "a", 10, 400), (0.1001, "p", 64, 1)])
    at_once, waits = (
        simulate_exact(replace(a_group(costs), prompts_wait=rows, order="ticket"), work).models["p"].ttft.mean
        for rows in (0, 1)
    )
    step_s = costs["a"].base.step_s
    assert at_once + 0.1 * step_s < waits < at_once + step_s
    alone = simulate_exact(replace(a_group(costs), prompts_wait=1), requests([(0.0, "p", 64, 1)]))
    assert alone.models["p"].ttft.mean < at_once
    both = simulate_exact(replace(a_group(costs), prompts_wait=1, is_ahead=True), work)
    assert both.num_unfinished == 0
    two = requests([(0.0, "a", 10, 400), (0.0, "a", 10, 400), (0.1001, "p", 64, 1)])
    ttft = [
        simulate_exact(replace(a_group(costs), prompts_wait=rows, order="ticket"), two).models["p"].ttft.mean
        for rows in (0, 1, 2)
    ]
    assert ttft[0] == ttft[1] < ttft[2], "steps of more rows are not waited for"


def test_a_prompt_beside_decode_takes_what_its_patience_allows_and_slows_decode():
    from dataclasses import replace

    from crosspool.simulator.group import Patience
    from crosspool.simulator.sharing import Sharing, twin_stations

    costs = {"a": LinearCost(attention=5, ffn=100, tail=0, row=0), "p": LinearCost(attention=5, ffn=60, row=0)}
    plain = a_group(costs)
    layers, step_s = 12, costs["a"].base.step_s
    sharing = Sharing(longer_s=0.5 * step_s / layers, prompt_slower=3.0)
    models = tuple(replace(model, sharing=sharing) for model in plain.models)
    group = replace(
        plain, models=models, patience=Patience(1e-3), prompts_share=True, stations=twin_stations(plain.stations)
    )
    found = simulate_exact(group, requests([(0.0, "a", 10, 200), (0.1, "p", 64, 1)]))
    assert found.models["p"].ttft.mean == pytest.approx(layers * (1e-3 + 3 * (5 + 6) * 1e-6), rel=0.02)
    assert found.models["a"].tbt.quantile(0.5) == pytest.approx(step_s, rel=0.06)
    assert found.models["a"].tbt.quantile(0.99) == pytest.approx(1.5 * step_s, rel=0.06)
    assert found.stations == ("kv", "weights", "kv-prompts", "weights-prompts")
    assert found.busy_s[3] == pytest.approx(layers * 1e-3, rel=0.05)
    alone = simulate_exact(group, requests([(0.0, "p", 64, 1)]))
    assert alone.models["p"].ttft.mean == pytest.approx(costs["p"].base.step_s, rel=0.05), "nobody to share with"
