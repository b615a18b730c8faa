"""Whole plans: what fits and what is refused, more memory, seeds, groups, traces, and what the plan says of itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosspool.errors import CapacityError
from crosspool.planner.deployment import parse_plan_input
from crosspool.planner.explain import explain
from crosspool.planner.plan import plan_from_json, read_plan
from crosspool.planner.planner import plan_deployment
from crosspool.planner.request_table import SteadySpeed
from crosspool.units import GiB

PAPER = ("qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite")
LENGTHS = {"prompt": 900, "output": 650, "prompt_cv": 0.8, "output_cv": 0.3}


def wanted(rate=0.5, names=PAPER, gpus=None, **more):
    return {
        "gpus": gpus or {"kind": "h200", "count": 2},
        "models": [{"model": name, "rate": rate, "lengths": LENGTHS} for name in names],
        "service": {"cost": "steady", "tbt_ms": 20},
        "precision": 0.05,
        **more,
    }


def plan(**kwargs):
    return plan_deployment(parse_plan_input(wanted(**kwargs))).plan


def test_a_plan_holds_everything_and_survives_json(tmp_path):
    made = plan()
    group = made.groups[0]
    assert group.kv_ranks == ("kv0",)
    assert group.weights_ranks == ("w0",)
    assert 0 < group.mean_bytes < group.required_bytes < group.budget_bytes
    assert group.required_low_bytes <= group.required_bytes <= group.required_high_bytes
    assert group.exact_quantile_bytes <= group.required_bytes
    assert group.budget_bytes == group.budget_bytes_per_rank - made.frame_bytes
    assert group.budget_bytes_per_rank == group.gpus[0].parts["kv_cache"]
    for model in group.models:
        assert model.tp_degree == 1
        assert 0 < model.floor_pages < model.ceiling_pages
        others = sum(one.floor_pages * one.frames_per_page for one in group.models if one is not model)
        assert model.ceiling_pages == (group.budget_bytes // made.frame_bytes - others) // model.frames_per_page
        assert model.seen_tokens == model.ceiling_pages * model.page_tokens
        assert model.longest_context_tokens == min(model.seen_tokens, model.max_context_tokens)
    path = tmp_path / "plan.json"
    path.write_text(made.to_json())
    assert read_plan(path) == made
    assert [layout.layout for layout in made.layouts] == ["crosspool", "static", "elastic"]


def test_the_same_input_and_seed_give_the_same_plan():
    assert plan(seed=3).to_json() == plan(seed=3).to_json()
    assert plan(seed=3) != plan(seed=4)


def test_files_that_are_no_plan_are_named(tmp_path):
    text = plan().to_json()
    with pytest.raises(ValueError, match="p is not a plan: seed"):
        plan_from_json(text.replace('"seed": 0', '"seed": "many"'), "p")
    with pytest.raises(ValueError, match="unexpected"):
        plan_from_json(json.dumps({**json.loads(text), "unexpected": 1}))
    with pytest.raises(ValueError, match="plan version 99, this is version 1; plan again"):
        plan_from_json(text.replace('"version": 1', '"version": 99'))
    with pytest.raises(ValueError, match="cannot read"):
        read_plan(tmp_path / "none.json")


def test_one_small_gpu_is_refused_with_the_numbers_and_the_smallest_set():
    with pytest.raises(CapacityError) as caught:
        plan(names=["glm-4.7-flash"], gpus={"kind": "a100-40gb", "count": 1})
    message = str(caught.value)
    assert "glm-4.7-flash needs 52.7 GiB of FFN; 1 weights rank of 40.0 GiB" in message
    assert "smallest set: 1 KV + 2 weights GPUs" in message


def test_demand_above_the_pool_is_refused_with_the_numbers():
    with pytest.raises(CapacityError, match=r"(mean|P99) of active KV .*; 1 KV rank offers .*smallest set: \d+ KV"):
        plan(rate=100.0, gpus={"kind": "h200", "count": 2, "used": "20MB"})


def test_a_guaranteed_context_that_no_request_can_see_is_refused():
    given_input = wanted(gpus={"kind": "a100-40gb", "count": 5})
    given_input["models"][1]["context"] = 150_000
    assert plan_deployment(parse_plan_input(given_input)).plan.groups[0].model("glm-4.7-flash").seen_tokens >= 150_000
    given_input["models"][0]["floor"] = 1000
    with pytest.raises(CapacityError, match=r"glm-4\.7-flash is guaranteed 150000 tokens .* one request of it sees"):
        plan_deployment(parse_plan_input(given_input))
    given_input["models"][0]["context"] = 50_000
    with pytest.raises(ValueError, match="whose own limit is 40960 tokens"):
        plan_deployment(parse_plan_input(given_input))


def test_floors_above_the_pool_are_refused():
    given_input = wanted()
    given_input["models"][0]["floor"] = 10_000
    with pytest.raises(ValueError, match=r"floors take 234\.4 GiB, the KV pool has"):
        plan_deployment(parse_plan_input(given_input))


@settings(max_examples=15)
@given(rate=st.floats(0.05, 3.0), memory=st.integers(60, 150), more=st.integers(1, 80))
def test_a_plan_that_fits_still_fits_with_more_memory(rate, memory, more):
    def tried(gib):
        try:
            return plan(rate=rate, gpus={"kind": "h200", "count": 3, "memory": gib * GiB}, precision=0.2)
        except CapacityError:
            return None

    small, large = tried(memory), tried(memory + more)
    if small is not None:
        assert large is not None
        assert large.groups[0].coverage >= small.groups[0].coverage
        seen = {model.name: model.seen_tokens for model in small.groups[0].models}
        if len(large.groups[0].kv_ranks) >= len(small.groups[0].kv_ranks):
            assert all(model.seen_tokens >= seen[model.name] for model in large.groups[0].models)


def test_reserving_needs_more_than_forecasting():
    forecast = plan(admission="forecast").groups[0]
    reserved_input = wanted(admission="reserve")
    for model in reserved_input["models"]:
        model["max_tokens"] = 4096
    reserve = plan_deployment(parse_plan_input(reserved_input)).plan.groups[0]
    assert reserve.required_bytes > 2 * forecast.required_bytes


def test_a_faster_gpu_holds_requests_for_less_time():
    fast = plan(service={"cost": "roofline"}).groups[0]
    slow = plan(service={"cost": "roofline"}, gpus={"kind": "a100-40gb", "count": 5}).groups[0]
    assert fast.models[0].tbt_s < slow.models[0].tbt_s
    assert fast.mean_bytes < slow.mean_bytes


def test_another_cost_model_decides_service_times():
    def factory(num_kv, num_weights):
        assert (num_kv, num_weights) == (1, 1)
        return lambda items: {item.facts.name: SteadySpeed(tbt_s=0.05) for item in items}

    made = plan_deployment(parse_plan_input(wanted()), factory).plan
    assert made.groups[0].models[0].tbt_s == pytest.approx(0.05, rel=0.01)
    assert any("cost model given" in note for note in made.notes)


def test_two_groups_hold_their_own_models():
    names = ["mixtral-8x7b", "gpt-oss-20b", "qwen3-30b-a3b", "glm-4.7-flash"]
    made = plan(names=names, rate=0.05, gpus={"kind": "h200", "count": 4, "per_group": 2})
    assert [group.name for group in made.groups] == ["g0", "g1"]
    assert sorted(model.name for group in made.groups for model in group.models) == sorted(names)
    ranks = [rank for group in made.groups for rank in (*group.kv_ranks, *group.weights_ranks)]
    assert ranks == ["g0.kv0", "g0.w0", "g1.kv0", "g1.w0"]
    assert made.placement.gap <= 0.01
    assert all(model.servable for group in made.groups for model in group.models)


def test_requests_over_several_kv_ranks_see_the_whole_pool_or_one_rank():
    gpus = {"kind": "h200", "count": 4, "kv": 2}
    whole = plan(gpus=gpus).groups[0]
    assert [model.kv_parallelism for model in whole.models] == ["heads", "tokens", "tokens"]
    given_input = wanted(gpus=gpus)
    for model in given_input["models"]:
        model["kv_parallelism"] = "one"
    one = plan_deployment(parse_plan_input(given_input)).plan.groups[0]
    for both, single in zip(whole.models, one.models, strict=True):
        assert both.seen_tokens == both.ceiling_pages * both.page_tokens
        assert single.seen_tokens == pytest.approx(both.seen_tokens / 2, rel=0.01)


def write_trace(path, num=400):
    rows = [f"{idx * 2.0},{'short' if idx % 2 else 'long'},{100 if idx % 2 else 3000},{50},{20}" for idx in range(num)]
    path.write_text("arrival_s,model,prompt_tokens,output_tokens,service_s\n" + "\n".join(rows) + "\n")


def test_a_trace_is_the_load_of_several_models(tmp_path):
    write_trace(tmp_path / "trace.csv")
    given_input = {
        "gpus": {"kind": "h200", "count": 2},
        "models": ["glm-4.7-flash", {"model": "deepseek-v2-lite", "name": "short"}],
        "trace": {"file": "trace.csv", "names": {"long": "glm-4.7-flash"}, "period": 800},
    }
    made = plan_deployment(parse_plan_input(given_input, tmp_path)).plan
    glm, short = made.groups[0].models
    assert (glm.rate_rps, short.rate_rps) == (0.25, 0.25)
    assert (glm.mean_service_s, short.mean_service_s) == (20.0, 20.0)
    assert glm.mean_live == pytest.approx(5.0)
    assert made.groups[0].mean_bytes == pytest.approx(5 * (3025 * 54144 + 125 * 31104))
    given_input["trace"] = {"file": "trace.csv"}
    with pytest.raises(ValueError, match="the trace has requests of long, which is not planned; add it to models"):
        plan_deployment(parse_plan_input(given_input, tmp_path))


def test_a_trace_of_one_moment_needs_a_period(tmp_path):
    write_trace(tmp_path / "trace.csv", num=1)
    given_input = {
        "gpus": {"kind": "h200", "count": 2},
        "models": [{"model": "glm-4.7-flash", "name": "long"}],
        "trace": {"file": "trace.csv"},
    }
    with pytest.raises(ValueError, match="all requests of the trace arrive at once; give trace"):
        plan_deployment(parse_plan_input(given_input, tmp_path))
    given_input["trace"] = {"file": "trace.csv", "period": 100}
    assert plan_deployment(parse_plan_input(given_input, tmp_path)).plan.groups[0].models[0].rate_rps == 0.01


def test_a_servegen_client_is_a_load_with_its_own_day(tmp_path):
    (tmp_path / "rates.csv").write_text("client,t_s,rate_rps,cv\n7,0,1.0,2.0\n7,43200,0.5,1.0\n")
    hist = {"hist": [[0, 1.0]]}
    lengths = {"bin_edges": [400, 401], "clients": {"7": {"input": hist, "output": hist}}}
    (tmp_path / "lengths.json").write_text(json.dumps(lengths))
    client = {"rates": "rates.csv", "lengths": "lengths.json", "client": 7}
    given_input = wanted(names=[]) | {"models": [{"model": "glm-4.7-flash", "servegen": client}]}
    model = plan_deployment(parse_plan_input(given_input, tmp_path)).plan.groups[0].models[0]
    assert model.rate_rps == pytest.approx(1.5 * 600 / 86400)
    given_input["models"][0]["rate"] = 0.05
    scaled = plan_deployment(parse_plan_input(given_input, tmp_path)).plan.groups[0].models[0]
    assert scaled.rate_rps == pytest.approx(0.05)
    assert scaled.quantile_bytes > model.quantile_bytes
    client["client"] = 8
    with pytest.raises(ValueError, match="have no client 8; they have 7"):
        plan_deployment(parse_plan_input(given_input, tmp_path))


def test_names_that_clash_are_refused():
    with pytest.raises(ValueError, match=r"two models are called 'glm-4\.7-flash': glm-4\.7-flash and zai-org/GLM-4"):
        plan(names=["glm-4.7-flash", "zai-org/GLM-4.7-Flash"])


def test_notes_tell_stand_ins_windows_and_what_cannot_be_served():
    names = ["zai-org/GLM-5-TEE", "gpt-oss-20b", "granite-3.1-1b-a400m"]
    notes = "\n".join(plan(names=names, rate=0.01, gpus={"kind": "h200", "count": 16, "per_group": 16}).notes)
    assert "the figures are those of deepseek-v3, which stands in for it" in notes
    assert "gpt-oss-20b: layers with a sliding window are budgeted in full" in notes
    assert "granite-3.1-1b-a400m: planned by numbers" in notes
    assert "20 ms between tokens, as told" in notes


def test_explanations_hold_the_plans_numbers():
    made = plan()
    text = "\n".join(explain(made))
    group = made.groups[0]
    for model in group.models:
        assert f"### {model.name}" in text
        assert f"longest context {model.longest_context_tokens:,} tokens" in text
        assert f"floor {model.floor_pages} pages, ceiling {model.ceiling_pages:,}" in text
    assert f"{group.pooling_gain:.2f} times" in text
    for note in made.notes:
        assert note in text
    for gpu in group.gpus:
        for part in gpu.parts:
            assert f"| {part} |" in text
