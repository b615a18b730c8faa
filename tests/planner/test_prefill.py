"""Prefill GPUs of a plan: what lies where, who fits, how long a switch takes, and what is refused."""

from __future__ import annotations

import pytest

from crosspool.commands.serve import deployment
from crosspool.deployment.prefill_room import prefill_summary, with_prefill_room
from crosspool.errors import CapacityError
from crosspool.models.whole_size import whole_bytes
from crosspool.planner.catalogue import model_facts
from crosspool.planner.deployment import parse_plan_input
from crosspool.planner.explain import explain
from crosspool.planner.plan import Plan, plan_from_json
from crosspool.planner.planner import plan_deployment
from crosspool.planner.saved import with_saved_plan
from crosspool.planner.serve_config import serve_settings
from crosspool.units import GiB
from tests.support.tiny_models import write_tiny_model

PAPER = ["qwen3-30b-a3b", "glm-4.7-flash", "deepseek-v2-lite"]


def plan(models=PAPER, **gpus) -> Plan:
    given = {"gpus": {"kind": "h200", "count": 3, "prefill": 1, **gpus}, "models": list(models)}
    return plan_deployment(parse_plan_input(given)).plan


def test_a_prefill_gpu_holds_two_of_the_largest_and_the_host_all_of_them():
    made = plan()
    (group,) = made.groups
    assert (group.kv_ranks, group.weights_ranks, group.prefill.ranks) == (("kv0",), ("w0",), ("p0",))
    assert made.num_gpus == 3
    sizes = {name: whole_bytes(model_facts(name).spec) for name in PAPER}
    assert {model.name: model.whole_bytes for model in group.prefill.models} == sizes
    assert group.prefill.host_bytes == sum(sizes.values())
    assert 2 * max(sizes.values()) <= group.prefill.room_bytes < 2 * max(sizes.values()) + GiB
    assert group.prefill.num_in_place == 2
    assert [model.switch_s for model in group.prefill.models] == [size / 55e9 for size in sizes.values()]
    (gpu,) = group.prefill.gpus
    assert gpu.parts["whole_models"] == group.prefill.room_bytes
    assert gpu.parts["reserve"] == group.gpus[0].parts["reserve"] > 0
    assert sum(gpu.parts.values()) == made.gpu_memory_bytes
    assert plan_from_json(made.to_json()) == made


def test_pools_have_the_other_gpus_and_room_for_what_prefill_ranks_hand_over():
    (ours,), (without,) = plan().groups, plan(count=2, prefill=0).groups
    beside = ours.gpus[0].parts["transfer"] - without.gpus[0].parts["transfer"]
    assert beside == 2 * 8192 * 2048 * 4, "two slots of a chunk's rows in float32"
    assert ours.budget_bytes < without.budget_bytes <= ours.budget_bytes + beside + 2 * 2**21
    assert without.prefill is None
    layouts = {layout.layout: layout for layout in plan().layouts}
    assert layouts["crosspool"].gpus == ("kv0", "w0", "p0")
    static = {layout.layout: layout for layout in plan(count=3, prefill=0).layouts}["static"]
    assert layouts["static"].kv_bytes >= static.kv_bytes - GiB, "other layouts use all three GPUs"


def test_smaller_gpus_have_room_for_fewer_models():
    small = plan(memory="80GiB", count=5, kv=1).groups[0].prefill
    assert small.num_in_place == 1
    assert small.gpus[0].parts["free"] == 0, "all that is left is room"
    told = plan(prefill_pool="60GiB").groups[0].prefill
    assert (told.room_bytes, told.num_in_place) == (60 * GiB, 1)


@pytest.mark.parametrize(
    ("gpus", "error", "message"),
    [
        (
            {"memory": "56GiB", "count": 6},
            CapacityError,
            r"qwen3-30b-a3b takes 56\.5 GiB whole, and .* use larger GPUs, or",
        ),
        (
            {"prefill_pool": "20GiB"},
            CapacityError,
            r"qwen3-30b-a3b takes 56\.5 GiB whole, .* has 20\.0 GiB .*; set more",
        ),
        ({"prefill_pool": "140GiB"}, CapacityError, r"prefill_pool is 140\.0 GiB; .* GiB for whole models; set less"),
        (
            {"host_memory": "128GiB"},
            CapacityError,
            r"each of 1 prefill ranks keeps 140\.7 GiB .*host_memory is 128\.0 GiB",
        ),
        ({"host_memory": "256GiB", "prefill": 2, "count": 4}, CapacityError, "each of 2 prefill ranks keeps 140"),
        ({"count": 4, "kv": 2}, CapacityError, r"gpus\.prefill is 1, and qwen3.* cannot use them: KV is cut over"),
        ({"prefill": 3}, ValueError, "prefill is 3 of 3 GPUs a group; the pools need at least one of them"),
        ({"prefill": 0, "host_memory": "1GiB"}, ValueError, "host_memory is 1073741824 without GPUs for prefill"),
        ({"kv": 2}, ValueError, r"gpus\.kv is 2 of 2 GPUs a group for the pools; it must lie between 1 and 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(gpus, error, message):
    with pytest.raises(error, match=message):
        plan(**gpus)


def test_more_kv_ranks_are_not_taken_where_prefill_ranks_then_have_no_model():
    (group,) = plan(count=5).groups
    assert len(group.kv_ranks) == 1


def test_models_that_prefill_ranks_cannot_take_keep_their_prompts_in_the_pools():
    given = {
        "gpus": {"kind": "h200", "count": 4, "prefill": 1, "kv": 2},
        "models": [{"model": "deepseek-v2-lite", "kv_parallelism": "one"}, "glm-4.7-flash"],
    }
    made = plan_deployment(parse_plan_input(given)).plan
    prefill = made.groups[0].prefill
    assert [model.name for model in prefill.models] == ["deepseek-v2-lite"]
    assert prefill.in_pools == ("glm-4.7-flash",)
    assert any(note.startswith("g0: prompts of glm-4.7-flash run in the pools") for note in made.notes)


def test_plan_and_explanation_show_it():
    lines = "\n".join(explain(plan()))
    assert "## g0: 1 KV, 1 weights, 1 prefill" in lines
    assert (
        "prompts run on p0: 140.7 GiB of models in host memory for each, 113.0 GiB of its GPU for those in place, 2"
        in lines
    )
    assert "| glm-4.7-flash | 55.3 GiB | 1.08 s |" in lines
    assert "| whole_models | 0 B | 0 B | 113.0 GiB |" in lines


def test_serve_starts_as_planned(tmp_path):
    directory = write_tiny_model(tmp_path / "tiny", "qwen3_moe")
    path = tmp_path / "plan.json"
    made = plan([{"model": str(directory), "name": "mine"}])
    path.write_text(made.to_json())
    config = deployment([], [], None, {"backend": "cuda"}, path)
    assert (config.pools.prefill, config.pools.num_prefill_ranks) == ("dedicated", 1)
    assert config.pools.prefill_pool_bytes is None, "serve takes the same by itself"
    spec = model_facts(str(directory)).spec
    assert with_prefill_room(config, [spec]).pools.prefill_pool_bytes == made.groups[0].prefill.room_bytes
    assert "prompts run on p0 on GPU 2" in prefill_summary(with_prefill_room(config, [spec]), [spec])
    assert deployment([], [], None, {"backend": "numpy"}, path).pools.prefill == "dedicated"
    told = plan(prefill_pool="60GiB")
    assert serve_settings(told, told.groups[0])["prefill_pool_bytes"] == 60 * GiB


def test_a_saved_plan_is_for_as_many_prefill_gpus():
    made = plan()
    for count, prefill in ((3, 0), (3, 2)):
        other = parse_plan_input({"gpus": {"kind": "h200", "count": count, "prefill": prefill}, "models": list(PAPER)})
        with pytest.raises(ValueError, match=f"g0 of the plan has 1 GPUs for prefill, the input {prefill}; plan again"):
            with_saved_plan(made, other)
    same = parse_plan_input({"gpus": {"kind": "h200", "count": 3, "prefill": 1}, "models": list(PAPER)})
    assert with_saved_plan(made, same)[0].plan == made


def test_groups_name_their_prefill_ranks():
    given = {
        "gpus": {"kind": "h200", "count": 6, "per_group": 3, "prefill": 1, "kv": 1},
        "models": ["qwen3-30b-a3b", "glm-4.7-flash", "mixtral-8x7b"],
    }
    made = plan_deployment(parse_plan_input(given)).plan
    assert [group.prefill.ranks for group in made.groups] == [("g0.p0",), ("g1.p0",)]
