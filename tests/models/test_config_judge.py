"""Our reading of a config against transformers' own, in both spellings and with every field left out in turn."""

from __future__ import annotations

import json

import numpy as np
import pytest

from crosspool.models.families.registry import FAMILIES, spec_from_config
from crosspool.models.rope import attention_factor, inv_freq
from crosspool.models.spec import GQASpec, MLASpec, MoEFFNSpec
from tests.support.tiny_models import CONFIGS, tiny_config

pytestmark = pytest.mark.judge

# What transformers has no (usable) default for: GLM-4.5's would rotate 21 of 42 elements, an odd part.
BARE = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}

# Tiny values beside which the default of a field makes no sense.
BESIDE = {
    "num_key_value_heads": {"num_attention_heads": 32},
    "n_group": {"n_routed_experts": 64},
    "num_experts_per_tok": {"n_routed_experts": 64},
}


def as_transformers_writes(values: dict) -> dict:
    """The same config in the spelling of transformers 5, every default spelled out."""
    from transformers import AutoConfig

    values = json.loads(json.dumps(values))
    config = AutoConfig.for_model(**values)
    written = config.to_dict()
    assert "rope_theta" not in written
    return written


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_both_spellings_give_one_spec(family):
    values = tiny_config(family, dtype="bfloat16")
    written = as_transformers_writes(values)
    assert "rope_parameters" in written
    assert spec_from_config(written) == spec_from_config(values)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_bare_config_takes_the_class_defaults(family):
    values = {"model_type": family, **BARE.get(family, {})}
    assert spec_from_config(values) == spec_from_config(as_transformers_writes(values))


@pytest.mark.parametrize(
    ("family", "field"),
    [(family, field) for family in sorted(CONFIGS) for field in sorted({*CONFIGS[family]} - {*BARE.get(family, {})})],
)
def test_an_absent_field_takes_the_class_default(family, field):
    beside = {name: value for name, value in BESIDE.get(field, {}).items() if name in CONFIGS[family]}
    values = tiny_config(family, **beside, **{field: ...})
    assert spec_from_config(values) == spec_from_config(as_transformers_writes(values))


ROPE_VARIANTS = {
    "plain": {"rope_theta": 5000.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}},
    "yarn_not_truncated": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 24,
            "beta_slow": 2,
            "truncate": False,
            "original_max_position_embeddings": 256,
        }
    },
    "yarn_mscale": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40,
            "mscale": 0.9,
            "mscale_all_dim": 0.6,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn_attention_factor": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": 1.25,
            "original_max_position_embeddings": 512,
        }
    },
    "yarn_without_original": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}

CASES = [(family, None) for family in sorted(FAMILIES)]
CASES += [(family, name) for family in ("llama", "deepseek_v2", "deepseek_v3", "glm4_moe") for name in ROPE_VARIANTS]
VARIANTS = {
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 4, "decoder_sparse_step": 3},
    "qwen3": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "mixtral": {"sliding_window": 9},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense", "sparse"]},
    "glm4_moe": {"partial_rotary_factor": 0.25, "first_k_dense_replace": 3},
    "olmoe": {"attention_bias": True, "num_key_value_heads": 2},
    "deepseek_v2": {"q_lora_rank": 40, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    "llama": {"attention_bias": True, "head_dim": 24},
}


@pytest.mark.parametrize(("family", "rope"), CASES)
@pytest.mark.parametrize("is_variant", [False, True])
def test_the_built_model_agrees_with_the_spec(family, rope, is_variant):
    """Not the config's fields but what transformers builds from them: modules, scales, frequencies, layer kinds."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    overrides = {**(VARIANTS.get(family, {}) if is_variant else {}), **(ROPE_VARIANTS[rope] if rope else {})}
    if rope == "plain":
        overrides["rope_scaling"] = None
    values = tiny_config(family, num_layers=6, **overrides)
    spec = spec_from_config(values)
    config = AutoConfig.for_model(**json.loads(json.dumps(values)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config)  # on the CPU, with numbers in it
    assert len(model.model.layers) == spec.num_layers
    for layer, built in zip(spec.layers, model.model.layers, strict=True):
        attention, module = layer.attention, built.self_attn
        np.testing.assert_allclose(inv_freq(attention.rope), rotary.inv_freq.numpy(), rtol=2e-6)
        assert attention_factor(attention.rope) == pytest.approx(rotary.attention_scaling, rel=1e-7)
        assert attention.softmax_scale == pytest.approx(module.scaling, rel=1e-7)
        if isinstance(attention, GQASpec):
            assert attention.head_dim == module.head_dim
            assert attention.num_kv_heads * attention.head_dim == module.k_proj.out_features
            everywhere = None if hasattr(config, "layer_types") else getattr(config, "sliding_window", None)
            window = getattr(module, "sliding_window", everywhere)
            assert attention.sliding_window == (window or None)
            assert attention.qkv_bias == (module.k_proj.bias is not None)
            assert attention.o_bias == (module.o_proj.bias is not None)
        else:
            assert isinstance(attention, MLASpec)
            assert attention.lora_norm_eps == module.kv_a_layernorm.variance_epsilon
            assert (attention.q_lora_rank is None) == (module.q_proj is not None)
        assert isinstance(layer.ffn, MoEFFNSpec) == hasattr(built.mlp, "experts")
        assert spec.norm_eps == built.input_layernorm.variance_epsilon
    assert spec.tie_word_embeddings == config.tie_word_embeddings
