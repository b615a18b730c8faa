"""Shapes that the kernels do not take are told by name before any process starts; every published model passes."""

from __future__ import annotations

import pytest

from crosspool.backends.cuda.kernels.limits import check_shapes
from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.deployment.prepared_model import prepare_models
from crosspool.errors import CheckpointError
from crosspool.models.families.registry import FAMILIES, spec_from_config
from crosspool.planner.catalogue import catalogue_facts, entries
from crosspool.pools_config import PoolsConfig
from tests.support.tiny_models import tiny_config, write_tiny_model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_usual_shapes_pass(family):
    check_shapes(spec_from_config(tiny_config(family)))


def test_published_models_of_known_families_pass():
    specs = [facts.spec for facts in map(catalogue_facts, entries()) if facts.spec.family in FAMILIES]
    assert len(specs) > 10
    for spec in specs:
        check_shapes(spec)


@pytest.mark.parametrize(
    ("family", "overrides", "said"),
    [
        ("llama", {"hidden": 60, "head_dim": 16}, "hidden_size is 60; GPUs take multiples of 8"),
        ("llama", {"hidden": 8200, "head_dim": 16}, "hidden_size is 8200; GPUs take at most 8192"),
        ("llama", {"head_dim": 6}, "head_dim is 6;"),
        ("llama", {"intermediate_size": 90}, "an FFN's width is 90;"),
        ("deepseek_v3", {"q_lora_rank": 20}, "q_lora_rank is 20;"),
        ("deepseek_v3", {"kv_lora_rank": 36}, "kv_lora_rank is 36;"),
        ("deepseek_v3", {"qk_nope_head_dim": 12}, "qk_nope_head_dim is 12;"),
        ("deepseek_v3", {"qk_rope_head_dim": 4}, "qk_rope_head_dim is 4;"),
        ("deepseek_v3", {"v_head_dim": 20}, "v_head_dim is 20;"),
        ("qwen3_moe", {"moe_intermediate_size": 44}, "an expert's width is 44;"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 44}, "the shared expert's width is 44;"),
        ("qwen3_moe", {"num_experts": 513}, "the number of experts is 513; GPUs take at most 512"),
        ("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 33}, "num_experts_per_tok is 33;"),
        ("deepseek_v3", {"n_routed_experts": 128, "n_group": 64}, "n_group is 64;"),
    ],
)
def test_what_the_kernels_do_not_take_is_named(family, overrides, said):
    with pytest.raises(ValueError, match=said):
        check_shapes(spec_from_config(tiny_config(family, **overrides)))


def test_a_deployment_on_gpus_tells_it_with_the_model(tmp_path):
    path = write_tiny_model(tmp_path / "odd", "llama", dtype="bfloat16", head_dim=6)
    config = DeploymentConfig(models=(ModelConfig(source=str(path)),))
    prepare_models(config)
    on_gpus = DeploymentConfig(models=config.models, pools=PoolsConfig(backend="cuda"))
    with pytest.raises(CheckpointError, match=r"model odd: head_dim is 6; .* backend numpy"):
        prepare_models(on_gpus)
