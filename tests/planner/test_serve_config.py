"""A plan becomes a serve configuration that reads back with the same numbers."""

from __future__ import annotations

import pytest

from crosspool.planner.deployment import parse_plan_input
from crosspool.planner.planner import plan_deployment
from crosspool.planner.serve_config import serve_settings, write_serve_configs
from crosspool.settings import load_deployment
from tests.support.tiny_models import write_tiny_model


def test_serve_reads_what_was_planned(tmp_path):
    directory = write_tiny_model(tmp_path / "tiny", "qwen3_moe")
    given = {
        "gpus": {"kind": "h200", "count": 3, "memory": "64MiB", "kv": 1},
        "models": [{"model": str(directory), "name": "mine"}],
        "engine": {"frame_bytes": 65536, "max_num_seqs": 7, "decode_lanes": 3},
        "memory": {"runtime": 0, "graphs": 0},
        "admission": "reserve",
    }
    plan = plan_deployment(parse_plan_input(given)).plan
    (path,) = write_serve_configs(plan, tmp_path / "serve")
    config = load_deployment({}, config_file=path)
    group, model = plan.groups[0], plan.groups[0].models[0]
    assert config.pools.kv_pool_bytes == group.budget_bytes_per_rank
    assert config.pools.frame_bytes == 65536
    assert config.pools.num_weights_ranks == 2
    assert (config.scheduling.max_num_seqs, config.scheduling.num_decode_lanes) == (7, 3)
    assert config.scheduling.admission == "reserve"
    served = config.models[0]
    assert (served.served_name, served.source) == ("mine", str(directory))
    assert (served.page_tokens, served.max_model_len) == (model.page_tokens, model.longest_context_tokens)


def test_catalogue_names_become_ids_of_the_hub():
    given = {"gpus": {"kind": "h200", "count": 2}, "models": ["glm-4.7-flash"]}
    plan = plan_deployment(parse_plan_input(given)).plan
    assert serve_settings(plan, plan.groups[0])["models"][0]["path"] == "zai-org/GLM-4.7-Flash"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ["granite-3.1-1b-a400m"]}, r"granite-3\.1-1b-a400m is planned by numbers"),
        ({"gpus": {"kind": "h200", "count": 4, "kv": 2}}, r"has 2 KV ranks, serve runs one for each model"),
    ],
)
def test_what_serve_cannot_run_is_refused(change, message):
    given = {"gpus": {"kind": "h200", "count": 2}, "models": ["glm-4.7-flash"], **change}
    plan = plan_deployment(parse_plan_input(given)).plan
    with pytest.raises(ValueError, match=message):
        serve_settings(plan, plan.groups[0])
