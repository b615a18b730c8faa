"""A plan becomes a serve configuration that reads back with the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crosspool.commands.serve import deployment
from crosspool.deployment.engine_and_cluster import engine_config
from crosspool.deployment.load import load_deployment
from crosspool.deployment.prepared_model import prepare_model
from crosspool.engine.engine_core import EngineCore
from crosspool.errors import CrossPoolError
from crosspool.planner.deployment import parse_plan_input
from crosspool.planner.plan import Plan
from crosspool.planner.planner import plan_deployment
from crosspool.planner.serve_config import serve_settings, write_serve_configs
from tests.support.tiny_models import write_tiny_model


def tiny_plan(tmp_path) -> Plan:
    directory = write_tiny_model(tmp_path / "tiny", "qwen3_moe")
    given = {
        "gpus": {"kind": "h200", "count": 3, "memory": "64MiB", "kv": 1},
        "models": [{"model": str(directory), "name": "mine"}],
        "engine": {"frame_bytes": 65536, "max_num_seqs": 7, "decode_lanes": 3},
        "memory": {"runtime": 0, "graphs": 0},
        "admission": "reserve",
    }
    return plan_deployment(parse_plan_input(given)).plan


def saved(plan: Plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    return path


def two_groups(tmp_path):
    given = {
        "gpus": {"kind": "h200", "count": 4, "per_group": 2, "kv": 1},
        "models": ["qwen3-30b-a3b", "glm-4.7-flash", "mixtral-8x7b"],
    }
    plan = plan_deployment(parse_plan_input(given)).plan
    assert [group.name for group in plan.groups] == ["g0", "g1"]
    return saved(plan, tmp_path), plan


@pytest.mark.parametrize("way", ["--plan", "--serve-config"])
def test_serve_reads_what_was_planned(tmp_path, way):
    plan = tiny_plan(tmp_path)
    if way == "--plan":
        config = deployment([], [], None, {}, saved(plan, tmp_path))
    else:
        (path,) = write_serve_configs(plan, tmp_path / "serve")
        config = load_deployment({}, config_file=path)
    group, model = plan.groups[0], plan.groups[0].models[0]
    assert config.pools.kv_pool_bytes == group.budget_bytes_per_rank
    assert config.pools.frame_bytes == 65536
    assert config.pools.num_weights_ranks == 2
    assert (config.scheduling.max_num_seqs, config.scheduling.num_decode_lanes) == (7, 3)
    assert config.scheduling.admission == "reserve"
    served = config.models[0]
    assert (served.served_name, served.source) == ("mine", str(tmp_path / "tiny"))
    assert (served.page_tokens, served.max_model_len) == (model.page_tokens, model.longest_context_tokens)
    page_bytes = model.frames_per_page * plan.frame_bytes
    assert served.kv_floor_bytes == model.floor_pages * page_bytes
    assert served.kv_ceiling_bytes == model.ceiling_pages * page_bytes


def test_the_engine_holds_to_the_plans_floors_and_ceilings_and_to_its_contexts(tmp_path):
    for name in ("one", "two"):
        write_tiny_model(tmp_path / name, "qwen3_moe", num_layers=2, max_position_embeddings=100_000)
    entry = {"rate": 1, "lengths": {"prompt": 300, "output": 200}}
    models = [{"model": str(tmp_path / name), "name": name, **entry} for name in ("one", "two")]
    given = {
        "gpus": {"kind": "h200", "count": 3, "memory": "64MiB", "kv": 1},
        "models": models,
        "engine": {"frame_bytes": 65536},
        "memory": {"runtime": 0, "graphs": 0},
    }
    plan = plan_deployment(parse_plan_input(given)).plan
    config = deployment([], [], None, {}, saved(plan, tmp_path))
    core = EngineCore(engine_config(config))
    for model in config.models:
        core.add_model(prepare_model(model, config).served)
    told = {model.name: model for model in core.stats(0.0).models}
    for model in plan.groups[0].models:
        assert model.floor_pages > 0
        assert told[model.name].frames_floor == model.floor_pages * model.frames_per_page
        assert told[model.name].frames_ceiling == model.ceiling_pages * model.frames_per_page
        assert core.context_limit(core.live_models[model.name].model) == model.longest_context_tokens


def test_catalogue_names_become_ids_of_the_hub():
    given = {"gpus": {"kind": "h200", "count": 2}, "models": ["glm-4.7-flash"]}
    plan = plan_deployment(parse_plan_input(given)).plan
    assert serve_settings(plan, plan.groups[0])["models"][0]["path"] == "zai-org/GLM-4.7-Flash"


def test_several_kv_ranks_are_served_with_each_models_split():
    given = {"gpus": {"kind": "h200", "count": 4, "kv": 2}, "models": ["glm-4.7-flash", "qwen3-30b-a3b"]}
    plan = plan_deployment(parse_plan_input(given)).plan
    [group] = plan.groups
    settings = serve_settings(plan, group)
    assert settings["kv_ranks"] == 2
    splits = {entry["name"]: entry["kv_split"] for entry in settings["models"]}
    assert splits == {"glm-4.7-flash": "tokens", "qwen3-30b-a3b": "heads"}
    for entry, model in zip(settings["models"], group.models, strict=True):
        pages = model.ceiling_pages * model.frames_per_page * plan.frame_bytes
        assert 2 * entry["kv_ceiling"] >= pages > 2 * entry["kv_ceiling"] - plan.frame_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ["granite-3.1-1b-a400m"]}, r"granite-3\.1-1b-a400m is planned by numbers"),
    ],
)
def test_what_serve_cannot_run_is_refused(change, message):
    given = {"gpus": {"kind": "h200", "count": 2}, "models": ["glm-4.7-flash"], **change}
    plan = plan_deployment(parse_plan_input(given)).plan
    with pytest.raises(ValueError, match=message):
        serve_settings(plan, plan.groups[0])


def test_flags_variables_and_yaml_stand_above_the_plan(tmp_path, monkeypatch):
    path = saved(tiny_plan(tmp_path), tmp_path)
    yaml_file = tmp_path / "more.yaml"
    yaml_file.write_text("port: 9000\nmax_num_batched_tokens: 96\nprefill_lanes: 2\n")
    monkeypatch.setenv("CROSSPOOL_PREFILL_LANES", "3")
    config = deployment([], [], yaml_file, {"max_num_seqs": 5, "max_model_len": 48}, path)
    assert (config.server.port, config.scheduling.max_num_batched_tokens) == (9000, 96)
    assert (config.scheduling.num_prefill_lanes, config.scheduling.max_num_seqs) == (3, 5)
    assert config.models[0].max_model_len == 48
    assert (config.scheduling.num_decode_lanes, config.pools.num_weights_ranks) == (3, 2)  # the plan's still


def test_a_prefill_step_is_the_backends_own_unless_the_plan_was_asked_for_one(tmp_path):
    plan = tiny_plan(tmp_path)
    path = saved(plan, tmp_path)
    for backend, tokens in (("numpy", 512), ("cuda", 8192)):
        config = deployment([], [], None, {"backend": backend}, path)
        assert config.scheduling.max_num_batched_tokens == tokens
    asked = saved(replace(plan, max_num_batched_tokens=96), tmp_path)
    assert deployment([], [], None, {"backend": "cuda"}, asked).scheduling.max_num_batched_tokens == 96


def test_a_plan_counts_the_memory_of_the_prefill_steps_that_gpus_take():
    given = {"gpus": {"kind": "h200", "count": 2}, "models": ["qwen3-30b-a3b"]}

    def activations(engine):
        plan = plan_deployment(parse_plan_input(given | {"engine": engine})).plan
        return plan.groups[0].gpus[0].parts["activations"]

    assert (
        activations({}) == activations({"max_num_batched_tokens": 8192}) > activations({"max_num_batched_tokens": 512})
    )


def test_one_group_of_several_is_served(tmp_path):
    path, plan = two_groups(tmp_path)
    for group in plan.groups:
        config = deployment([], [], None, {}, path, group.name)
        assert [model.served_name for model in config.models] == [model.name for model in group.models]
        assert config.pools.kv_pool_bytes == group.budget_bytes_per_rank


@pytest.mark.parametrize(
    ("sources", "group", "message"),
    [
        ([], None, "the plan has groups g0, g1; choose one with --plan-group"),
        ([], "g7", "the plan has no group 'g7'; it has g0, g1"),
        (["other=/models/other"], "g0", "the plan says which models are served"),
    ],
)
def test_what_does_not_go_with_a_plan_is_refused(tmp_path, sources, group, message):
    path, _ = two_groups(tmp_path)
    with pytest.raises(CrossPoolError, match=message) as caught:
        deployment(sources, [], None, {}, path, group)
    assert "\n" not in str(caught.value)


def test_a_group_without_a_plan_and_a_file_that_is_no_plan_are_refused(tmp_path):
    with pytest.raises(CrossPoolError, match="give --plan FILE too"):
        deployment([], [], None, {}, None, "g0")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(CrossPoolError, match="is not a plan"):
        deployment([], [], None, {}, tmp_path / "plan.json")
