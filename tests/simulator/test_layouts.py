"""The same models on the same GPUs in three layouts, from planner to result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from crosspool.errors import CapacityError
from crosspool.planner.deployment import PlanInput
from crosspool.planner.layouts import replica_size
from crosspool.planner.planner import plan_deployment
from crosspool.simulator.cost import decode_work
from crosspool.simulator.driver import CoreDriver, SimulatedRequest
from crosspool.simulator.exact import simulate_exact
from crosspool.simulator.layouts import simulated_group
from crosspool.simulator.simulator import SimulationSettings, simulate
from crosspool.simulator.steps import simulate_steps

PAPER = """
gpus: {kind: a100-40gb, count: 5, kv: 1}
service: {cost: steady, tbt_ms: 20}
precision: 0.2
models:
  - {model: qwen3-30b-a3b, rate: 0.2, lengths: {prompt: 300, output: 100}}
  - {model: glm-4.7-flash, rate: 0.2, lengths: {prompt: 300, output: 100}}
  - {model: deepseek-v2-lite, rate: 0.2, lengths: {prompt: 300, output: 100}}
"""


def planned(text=PAPER):
    plan_input = PlanInput.model_validate(yaml.safe_load(text))
    return plan_deployment(plan_input), plan_input


@pytest.fixture(scope="module")
def paper():
    return planned()


def group(paper, layout, **options):
    deployment, plan_input = paper
    first = deployment.groups[0]
    return simulated_group(first.models, first.split, plan_input, layout, **options)


def longest(simulated, model: str) -> int:
    """The longest prompt of one request, with one token of output, that the layout does not refuse as too large."""
    low, high = 1, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        result = simulate_steps(simulated, [SimulatedRequest(0.0, model, middle, 1, 1)], stop_s=1e-9)
        low, high = (middle, high) if not result.total.refused else (low, middle)
    return low


def test_one_request_sees_what_the_planner_says(paper):
    """Contexts by layout and attention type: MLA in a monolithic layout sees one GPU, here the whole KV pool."""
    deployment, _ = paper
    wide = [
        (layout.layout, model, min(seen, deployment.plan.groups[0].model(model).max_context_tokens))
        for layout in deployment.plan.layouts
        for model, seen in layout.seen_tokens.items()
    ]
    for layout, model, seen in wide:
        share = longest(group(paper, layout), model) / seen
        assert 0.93 <= share <= 1.0, (layout, model, share)  # frames of a page are filled to 94 % for MLA of 47 layers


def test_a_share_of_the_ffns_beside_attention_takes_kv_and_quickens_decode():
    two = planned(PAPER.replace("a100-40gb, count: 5", "h200, count: 2"))
    whole, cut = group(two, "crosspool"), group(two, "crosspool", beside_share=0.25)
    taken = whole.config.kv_budget_bytes - cut.config.kv_budget_bytes
    ffn_bytes = sum(model.facts.ffn_bytes for model in two[0].groups[0].models)
    assert taken == pytest.approx(0.25 * ffn_bytes, rel=1e-4)
    requests = [SimulatedRequest(0.001 * n, model, 300, 60, 60) for n in range(4) for model in whole.by_name]
    requests.sort(key=lambda request: request.arrival_s)
    ours, theirs = (simulate_exact(given, requests).total.tbt.mean for given in (cut, whole))
    assert 0.7 * theirs < ours < 0.9 * theirs
    with pytest.raises(CapacityError, match=r"0.99 of the FFNs takes .* GiB of the KV GPU"):
        group(two, "crosspool", beside_share=0.99)
    models = [{"model": "deepseek-v2-lite", "rate": 0.2, "lengths": {"prompt": 300, "output": 100}}]
    single = planned(yaml.safe_dump({"gpus": {"kind": "h200", "count": 1}, "precision": 0.2, "models": models}))
    with pytest.raises(ValueError, match=r"on 1 GPU\(s\) cannot be simulated"):
        group(single, "crosspool", beside_share=0.25)


def test_every_layout_serves_the_same_requests(paper):
    deployment, plan_input = paper
    results = {
        layout: simulate(deployment, plan_input, SimulationSettings(layout=layout, duration_s=20.0, seed=3))[0]
        for layout in ("crosspool", "static", "elastic")
    }
    arrived = {result.total.num_arrived for result in results.values()}
    assert len(arrived) == 1
    for result in results.values():
        assert result.total.num_finished == result.total.num_arrived > 0
        assert result.num_unfinished == 0
        assert all(0 <= result.bubble_share(index) <= 1 for index in range(len(result.stations)))
        assert all(result.occupancy[rank].peak <= budget for rank, budget in result.frame_budget.items())
    tokens = {result.total.num_tokens for result in results.values()}
    assert len(tokens) == 1


def test_contention_on_a_shared_gpu_slows_both_models(paper):
    simulated = group(paper, "elastic")
    homes = {model.name: set(model.gpus) for model in simulated.models}
    pair = next((a, b) for a in homes for b in homes if a < b and homes[a] & homes[b])
    alone = {
        name: simulate_steps(simulated, [SimulatedRequest(0.0, name, 8, 200, 200)]).total.tbt.mean for name in pair
    }
    both = simulate_steps(simulated, [SimulatedRequest(0.0, name, 8, 200, 200) for name in pair])
    for name in pair:
        assert 1.5 * alone[name] < both.models[name].tbt.mean < 2.1 * alone[name]


def test_streams_of_both_pools_on_one_gpu_alternate_like_those_of_whole_models():
    """Two models beside each other take the sum of their layers less the attention of a row of each."""
    text = PAPER.replace("count: 5, kv: 1", "count: 1").replace("a100-40gb", "h200")
    two = planned("\n".join(line for line in text.splitlines() if "glm" not in line))
    simulated = replace(group(two, "crosspool"), order="streams")
    names = [model.name for model in simulated.models]
    both = simulate_steps(simulated, [SimulatedRequest(0.0, name, 8, 400, 400) for name in names])
    times = [model.cost.times(decode_work(1, 208.0)) for model in simulated.models]
    round_s = sum(each.step_s / each.num_layers - each.attention_s for each in times)
    assert simulated.stations == ("gpu",)
    for name, own in zip(names, times, strict=True):
        expected_s = max(own.step_s, own.num_layers * round_s)
        assert both.models[name].tbt.quantile(0.5) == pytest.approx(expected_s, rel=0.06)


def test_prompts_of_both_pools_on_one_gpu_step_aside_for_as_long_as_they_may():
    text = "\n".join(line for line in PAPER.splitlines() if "glm" not in line)
    text = text.replace("a100-40gb", "h200").replace("rate: 0.2", "rate: 4")

    def first_token_s(gpus, **patience):
        plan, plan_input = planned(text.replace("count: 5, kv: 1", gpus))
        settings = SimulationSettings(duration_s=30.0, order="streams", seed=3, **patience)
        return simulate(plan, plan_input, settings)[0].total.ttft.quantile(0.9)

    assert first_token_s("count: 1", patience_s=2e-3) > 1.5 * first_token_s("count: 1")
    with pytest.raises(ValueError, match="patience_us with mode steps, which has no puts and waits; use mode exact"):
        first_token_s("count: 2, kv: 1", patience_s=2e-3)


def test_elastic_models_share_what_static_ones_keep_apart():
    text = PAPER.replace("count: 5, kv: 1", "count: 1").replace("a100-40gb", "h200")
    text = "\n".join(line for line in text.splitlines() if "glm" not in line)
    single = planned(text)
    static, elastic = group(single, "static"), group(single, "elastic")
    model = "deepseek-v2-lite"
    work = [SimulatedRequest(0.0, model, 150_000, 1, 1) for _ in range(20)]
    admitted = {}
    for simulated in (static, elastic):
        driver = CoreDriver(simulated)
        for request in work:
            driver.accept(request, 0.0)
        admitted[simulated.layout] = driver.core.live_models[model].num_live
    assert 0 < 2 * admitted["static"] <= admitted["elastic"] <= 2 * admitted["static"] + 1


def test_a_page_is_granted_on_all_gpus_of_a_replica_or_on_none(paper):
    simulated = group(paper, "elastic")
    core = simulated.make_core()
    for model in simulated.models:
        pages = core.kv.by_rank[model.name]
        assert pages.kv_rank == model.name
        assert pages.num_held == 0
    qwen = simulated.by_name["qwen3-30b-a3b"]
    assert replica_size(4, len(qwen.gpus)) == len(qwen.gpus)
    assert replica_size(1, 4) == 1
    assert replica_size(2, 4) == 2
    assert replica_size(4, 6) == 3


def test_monolithic_layouts_have_no_exact_mode(paper):
    with pytest.raises(ValueError, match="layout static has no put and wait; simulate it with mode steps"):
        simulate_exact(group(paper, "static"), [])


def test_a_layout_that_cannot_hold_the_weights_is_refused():
    text = PAPER.replace("count: 5, kv: 1", "count: 4, memory: 52GB, kv: 1")
    tight = planned(text)
    with pytest.raises(CapacityError, match="layout static cannot place 3 models on 4 GPUs"):
        group(tight, "static")


def test_kv_ranks_that_keep_requests_are_stations_of_their_own():
    lines = PAPER.replace("count: 5, kv: 1", "count: 6, kv: 2").replace("}}", "}, kv_parallelism: one}")
    apart = group(planned(lines), "crosspool")
    assert apart.stations == ("kv0", "kv1", "weights")
    assert [model.route.kv for model in apart.models] == [0, 1, 0]
    assert {model.served.kv_rank for model in apart.models} == {"kv0", "kv1"}
    together = group(planned(PAPER.replace("count: 5, kv: 1", "count: 6, kv: 2")), "crosspool")
    assert together.stations == ("kv", "weights")
    assert together.config.num_frames == pytest.approx(2 * apart.config.num_frames, abs=2)
    mixed = PAPER.replace("count: 5, kv: 1", "count: 6, kv: 2").replace("100}}", "100}, kv_parallelism: one}", 1)
    with pytest.raises(ValueError, match="qwen3-30b-a3b keeps requests on one KV rank"):
        group(planned(mixed), "crosspool")


def test_two_pools_on_one_gpu_overlap_nothing():
    text = PAPER.replace("count: 5, kv: 1", "count: 1").replace("a100-40gb", "h200")
    single = group(planned("\n".join(line for line in text.splitlines() if "glm" not in line)), "crosspool")
    assert single.stations == ("gpu",)
    work = [SimulatedRequest(0.0, model.name, 8, 200, 200) for model in single.models]
    result = simulate_exact(single, work)
    assert result.busy_s[0] <= result.in_flight_s
    assert simulate_steps(single, work).total.tbt.mean == pytest.approx(result.total.tbt.mean, rel=0.02)
    alone = simulate_exact(single, work[:1])
    assert result.models[work[0].model].tbt.mean > 1.4 * alone.total.tbt.mean


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "fast"}, "mode 'fast' is unknown"),
        ({"layout": "dense"}, "layout 'dense' is unknown"),
        ({"duration_s": 0.0}, "duration is 0.0 s"),
        ({"start_s": -1.0}, "start_s is -1; it must be 0 or more"),
        ({"patience_token_s": -1.0}, "patience_token_s is -1; it must be 0 or more"),
        ({"patience_s": float("nan")}, "patience_s is nan; it must be 0 or more"),
        ({"prompts_wait": -1, "mode": "exact"}, "prompts_wait is -1; it must be 0 or more"),
        ({"prompts_share": True, "mode": "exact"}, "which is inf s; give a patience, and mode exact"),
        ({"prompts_share": True}, "give a patience, and mode exact"),
        ({"prompts_wait": 8, "is_ahead": True}, "ahead and prompts_wait with mode steps, .*; use mode exact"),
        ({"patience_s": 1e-3}, "patience_us with mode steps, which has no puts and waits; use mode exact"),
        ({"patience_token_s": 1e-6, "mode": "exact"}, "added to patience_us, which is for ever; give that as well"),
        ({"beside_share": 1.0}, "beside_share is 1.0 with layout crosspool; give at least 0 and below 1"),
        ({"beside_share": 0.25, "layout": "static"}, "beside_share is 0.25 with layout static"),
        ({"pass_rows": (1, 4, 2)}, "pass_rows are 1,4,2; give numbers above 0, each larger than the one before"),
        ({"pass_rows": (0, 4)}, "pass_rows are 0,4; give numbers above 0"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SimulationSettings(**change)
