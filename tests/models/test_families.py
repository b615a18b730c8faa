"""What each family makes of its config: routers, dense layers among MoE layers, windows, and refusals by name."""

from __future__ import annotations

import math

import pytest

from crosspool.errors import CheckpointError, UnsupportedModelError
from crosspool.models.families.registry import FAMILIES, spec_from_config
from crosspool.models.spec import DenseFFNSpec, GQASpec, MLASpec, MoEFFNSpec, RouterSpec
from tests.support.tiny_models import CONFIGS, tiny_config

LLAMA3 = CONFIGS["llama"]["rope_scaling"]


def router(family: str, **overrides) -> RouterSpec:
    ffn = spec_from_config(tiny_config(family, **overrides)).layers[-1].ffn
    assert isinstance(ffn, MoEFFNSpec)
    return ffn.router


def moe_layers(config: dict) -> list[int]:
    spec = spec_from_config(config)
    return [idx for idx, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoEFFNSpec)]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3_moe", RouterSpec(score="softmax", renormalise=True)),
        ("deepseek_v2", RouterSpec(score="softmax", group_score="max")),
        ("mixtral", RouterSpec(score="softmax", renormalise=True)),
        ("olmoe", RouterSpec(score="softmax")),
        ("qwen2_moe", RouterSpec(score="softmax")),
        ("gpt_oss", RouterSpec(score="softmax_of_topk", logit_bias=True)),
    ],
)
def test_softmax_routers(family, expected):
    assert router(family) == expected


@pytest.mark.parametrize(
    ("family", "num_groups", "topk_groups", "scale"),
    [("glm4_moe_lite", 1, 1, 1.8), ("glm4_moe", 1, 1, 1.5), ("deepseek_v3", 4, 2, 2.5)],
)
def test_sigmoid_routers_choose_with_a_bias_and_weigh_without(family, num_groups, topk_groups, scale):
    found = router(family)
    assert (found.score, found.choice_bias, found.renormalise) == ("sigmoid", True, True)
    assert (found.num_groups, found.topk_groups, found.scale) == (num_groups, topk_groups, scale)
    assert found.renormalise_eps == 1e-20
    assert found.group_score == "top2_sum"


def test_renormalisation_follows_the_config_where_the_family_has_the_choice():
    for family in ("qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe_lite", "deepseek_v3"):
        assert router(family, norm_topk_prob=True).renormalise
        assert not router(family, norm_topk_prob=False).renormalise
    assert not router("qwen3_moe", norm_topk_prob=...).renormalise  # the class default, not the checkpoints' value


def test_group_limited_greedy_scores_groups_by_their_best_expert():
    found = router("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2)
    assert (found.num_groups, found.topk_groups, found.group_score) == (4, 2, "max")
    # n_group without the method that uses it changes nothing (DeepSeek-V2-Lite says n_group 1, topk_method greedy).
    assert router("deepseek_v2", n_group=4, topk_group=2).num_groups == 1


def test_a45_step_and_list_decide_which_qwen_layers_are_moe():
    config = tiny_config("qwen3_moe", num_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert moe_layers(config) == [1, 5]
    assert moe_layers(tiny_config("qwen3_moe", num_layers=6, num_experts=0)) == []
    assert moe_layers(tiny_config("qwen2_moe", num_layers=4, mlp_only_layers=[0])) == [1, 2, 3]


def test_a45_leading_dense_layers():
    for family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"):
        config = tiny_config(family, num_layers=5, first_k_dense_replace=2)
        assert moe_layers(config) == [2, 3, 4]
        assert all(isinstance(layer.ffn, DenseFFNSpec) for layer in spec_from_config(config).layers[:2])
    kinds = ["dense", "sparse", "dense"]
    assert moe_layers(tiny_config("glm4_moe_lite", mlp_layer_types=kinds)) == [1]


def test_dense_and_expert_widths_are_not_mixed_up():
    spec = spec_from_config(tiny_config("deepseek_v2", intermediate_size=96, moe_intermediate_size=48))
    dense, moe = spec.layers[0].ffn, spec.layers[1].ffn
    assert isinstance(dense, DenseFFNSpec)
    assert isinstance(moe, MoEFFNSpec)
    assert moe.shared is not None
    assert (dense.intermediate_size, moe.expert_intermediate_size, moe.shared.intermediate_size) == (96, 48, 96)


def windows(family: str, **overrides) -> list[int | None]:
    layers = spec_from_config(tiny_config(family, num_layers=4, **overrides)).layers
    return [layer.attention.sliding_window for layer in layers if isinstance(layer.attention, GQASpec)]


def test_windows_per_layer():
    assert windows("gpt_oss", sliding_window=8) == [8, None, 8, None]
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows("gpt_oss", sliding_window=8, layer_types=kinds) == [None, None, 8, None]
    assert windows("qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=3) == [None, None, None, 8]
    assert windows("qwen3", sliding_window=8, use_sliding_window=False) == [None] * 4
    assert windows("qwen3_moe", sliding_window=8, use_sliding_window=True) == [8] * 4
    assert windows("qwen3_moe", sliding_window=8) == [None] * 4
    assert windows("mixtral", sliding_window=8) == [8] * 4
    assert windows("mixtral", sliding_window=None) == [None] * 4


def test_yarn_enters_the_softmax_scale_of_latent_attention():
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707}
    with_all_dim = tiny_config("deepseek_v2", rope_scaling={**rope, "mscale_all_dim": 0.707})
    attention = spec_from_config(with_all_dim).layers[0].attention
    assert isinstance(attention, MLASpec)
    assert attention.softmax_scale == pytest.approx(32**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    without = spec_from_config(tiny_config("deepseek_v2", rope_scaling=rope)).layers[0].attention
    assert without.softmax_scale == pytest.approx(32**-0.5)


def test_partial_rope_turns_a_part_of_the_head():
    attention = spec_from_config(tiny_config("glm4_moe", head_dim=32, partial_rotary_factor=0.5)).layers[0].attention
    assert attention.rope.dim == 16
    assert spec_from_config(tiny_config("qwen3_moe", head_dim=32)).layers[0].attention.rope.dim == 32


def test_rope_pairs_are_neighbours_in_latent_attention_only():
    def is_interleaved(family: str, **overrides) -> bool:
        return spec_from_config(tiny_config(family, **overrides)).layers[0].attention.rope.interleaved

    assert is_interleaved("deepseek_v2")
    for family in ("deepseek_v3", "glm4_moe_lite"):
        assert is_interleaved(family, rope_interleave=...)
        assert not is_interleaved(family, rope_interleave=False)
    for family in ("qwen3_moe", "glm4_moe", "gpt_oss", "llama"):
        assert not is_interleaved(family)


def test_an_explicit_null_is_not_an_absent_field():
    with_null = spec_from_config(tiny_config("deepseek_v3", q_lora_rank=None)).layers[0].attention
    absent = spec_from_config(tiny_config("deepseek_v3", q_lora_rank=...)).layers[0].attention
    assert with_null.q_lora_rank is None
    assert absent.q_lora_rank == 1536


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("llama", {"model_type": "mamba"}, ("model_type", "'mamba'", "qwen3_moe")),
        ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, ("'longrope'", "yarn")),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("'dynamic'", "llama3")),
        ("llama", {"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "silu")),
        ("gpt_oss", {"hidden_act": "relu"}, ("hidden_act", "'relu'", "silu")),
        ("gpt_oss", {"swiglu_limit": 6.0}, ("swiglu_limit", "6.0", "7.0")),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, ("'mxfp4'", "bfloat16")),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, ("'fp8'", "unquantised")),
        ("llama", {"mlp_bias": True}, ("mlp_bias", "True")),
        ("olmoe", {"clip_qkv": 8.0}, ("clip_qkv", "8.0")),
        ("deepseek_v2", {"norm_topk_prob": True}, ("norm_topk_prob", "True")),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ("topk_method", "'noaux_tc'", "greedy")),
        ("deepseek_v3", {"topk_method": "greedy"}, ("topk_method", "'greedy'", "noaux_tc")),
        ("deepseek_v3", {"scoring_func": "softmax"}, ("scoring_func", "'softmax'", "sigmoid")),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "linear"]}, ("mlp_layer_types", "'linear'")),
        ("qwen3", {"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, ("'chunked_attention'",)),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, ("dtype", "'float8_e4m3fn'", "bfloat16")),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ("llama", {"num_hidden_layers": 1024}, ("1024", "1023")),
        ("qwen3_moe", {"num_hidden_layers": 10**15}, ("num_hidden_layers", "1023")),  # would not fit as a list
        ("qwen3_moe", {"num_experts": 10**9}, ("1000000000 experts", "16384")),
        ("deepseek_v2", {"rope_interleave": False}, ("rope_interleave", "False", "True")),
        ("glm4_moe", {"text_config": {"model_type": "llama"}}, ("'glm4_moe'", "text_config", "multimodal")),
    ],
)
def test_what_no_family_implements_is_refused_by_name(family, overrides, words):
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config(tiny_config(family, **overrides))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, ("9 of 8",)),
        ("deepseek_v3", {"n_group": 3}, ("8 experts", "n_group 3")),
        ("deepseek_v3", {"topk_group": 5}, ("topk_group 5 of n_group 4",)),
        ("deepseek_v3", {"num_experts_per_tok": 5}, ("5 of 4 eligible",)),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, ("mlp_layer_types", "each layer")),
        ("qwen3_moe", {"mlp_only_layers": 3}, ("mlp_only_layers is 3",)),
        ("deepseek_v2", {"num_experts_per_tok": ...}, ("num_experts_per_tok is missing",)),
        ("glm4_moe", {"head_dim": 42}, ("21 of its 42 elements",)),
        ("glm4_moe", {"partial_rotary_factor": 2.0}, ("partial_rotary_factor is 2.0", "at most 1")),
        ("llama", {"rms_norm_eps": -1.0}, ("rms_norm_eps is -1.0", "above 0")),
        ("llama", {"rms_norm_eps": math.nan}, ("rms_norm_eps is nan", "finite")),
        ("deepseek_v3", {"routed_scaling_factor": math.inf}, ("routed_scaling_factor is inf", "finite")),
        ("llama", {"rope_scaling": None, "rope_theta": 0}, ("rope_theta is 0", "above 1")),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, ("factor is 0", "above 0")),
        ("qwen3_moe", {"rope_scaling": {"type": "yarn", "factor": -2}}, ("factor is -2", "above 0")),
        ("qwen3_moe", {"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": -1}}, ("beta_slow is -1", "above 0")),
        ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ("high_freq_factor is 1.0", "above 1")),
        ("gpt_oss", {"sliding_window": None}, ("sliding_window",)),
    ],
)
def test_fields_at_odds_with_each_other_are_told(family, overrides, words):
    with pytest.raises(CheckpointError) as caught:
        spec_from_config(tiny_config(family, **overrides))
    for word in words:
        assert word in str(caught.value)


def test_every_family_is_registered_under_its_model_type():
    assert len(FAMILIES) == 11
    assert all(family.model_type == name for name, family in FAMILIES.items())
