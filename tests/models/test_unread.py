"""Fields that change answers and that a family does not obey are refused; what publishers write anyway is not."""

from __future__ import annotations

import pytest

from crosspool.errors import UnsupportedModelError
from crosspool.models.families.registry import FAMILIES, spec_from_config
from crosspool.models.families.unread import NEUTRAL
from tests.support.tiny_models import tiny_config

# Beside a usual config of the family, of what its publishers write, what could be taken for something else.
PUBLISHED = {
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "ep_size": 1},
    "glm4_moe": {"num_nextn_predict_layers": 1, "rope_scaling": None},
    "glm4_moe_lite": {"partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1},
    "gpt_oss": {"experts_per_token": 2, "initial_context_length": 4096, "swiglu_limit": 7.0},
    "llama": {"mlp_bias": False, "pretraining_tp": 1, "sliding_window": None},
    "mixtral": {"sliding_window": None, "router_jitter_noise": 0.0},
    "olmoe": {"clip_qkv": None},
    "qwen2_moe": {"sliding_window": 32768, "max_window_layers": 21, "use_sliding_window": False},
    "qwen3": {"sliding_window": None, "max_window_layers": 36, "use_sliding_window": False},
    "qwen3_moe": {"sliding_window": 4096, "max_window_layers": 48, "mlp_only_layers": []},
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_publishers_write_changes_nothing(family):
    spec = spec_from_config(tiny_config(family, num_layers=3))
    rope = {} if "rope_scaling" not in PUBLISHED[family] else {"rope_scaling": None}
    assert spec_from_config(tiny_config(family, **PUBLISHED[family])) == spec_from_config(tiny_config(family, **rope))
    assert spec.family == family


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"logits_scaling": 8.0}),
        ("llama", {"sliding_window": 4096}),
        ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 3}),
        ("glm4_moe", {"sliding_window": 128}),
        ("glm4_moe", {"swiglu_limit": 10.0}),
        ("glm4_moe", {"rope_interleave": True}),
        ("mixtral", {"norm_topk_prob": False}),
        ("olmoe", {"routed_scaling_factor": 2.5}),
        ("qwen3_moe", {"scoring_func": "sigmoid"}),
        ("deepseek_v2", {"moe_layer_freq": 2}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("deepseek_v3", {"index_topk": 2048}),
        ("qwen3", {"compression_config": {"quant_method": "compressed-tensors"}}),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(family, overrides):
    ((name, value),) = overrides.items()
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config(tiny_config(family, **overrides))
    message = str(caught.value)
    assert message.startswith(f"config.json: {name} is ")
    assert f"type {family} " in message
    assert "supported: null" in message
    assert "\n" not in message
    assert str(value) in message or "'sliding_attention'" in message


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_null_is_as_good_as_absent_and_so_is_every_neutral_value(family):
    spec = spec_from_config(tiny_config(family))
    for name, neutral in NEUTRAL.items():
        unknown = name not in tiny_config(family) and (name, family) not in OBEYED
        for value in (None, *neutral) if unknown else ():
            stated = [value] * 3 if name == "layer_types" and value else value
            assert spec_from_config(tiny_config(family, **{name: stated})) == spec, (name, value)


OBEYED = {
    ("layer_types", "gpt_oss"),
    ("norm_topk_prob", "deepseek_v2"),
    ("rope_interleave", "deepseek_v2"),
    ("rope_interleave", "deepseek_v3"),
    ("routed_scaling_factor", "deepseek_v2"),
    ("scoring_func", "deepseek_v3"),
    ("scoring_func", "glm4_moe"),
    ("scoring_func", "glm4_moe_lite"),
}
"""Fields of the table that mean something in a family whose tiny config leaves them out."""
