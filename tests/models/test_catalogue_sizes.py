"""Published models at full size, from their configs: KV bytes per token exactly, parameter counts within 0.1 %.

The table's parameter counts are rounded to 0.01 B (0.001 B for OLMoE-sized attention) and leave out norms and biases.
"""

from __future__ import annotations

import pytest

from crosspool.models.families.registry import spec_from_config
from crosspool.models.spec import DenseFFNSpec, MoEFFNSpec
from crosspool.models.tensors import weight_bytes
from tests.support.model_size import num_parameters

QWEN3 = {"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
QWEN3 |= {"num_key_value_heads": 4, "norm_topk_prob": True, "rope_theta": 1e6, "max_position_embeddings": 40960}
V3 = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432}
V3 |= {"moe_intermediate_size": 2048, "n_shared_experts": 1, "q_lora_rank": 1536, "kv_lora_rank": 512}
V3 |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_tok": 8}
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088}
GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4}

CONFIGS = {
    "Qwen3-30B-A3B": QWEN3
    | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768},
    "Qwen3-235B-A22B": QWEN3
    | {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536},
    "GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "first_k_dense_replace": 1,
        "intermediate_size": 10240,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "vocab_size": 154880,
        "num_nextn_predict_layers": 1,
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "OLMoE-1B-7B": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "intermediate_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 50304,
    },
    "gpt-oss-20b": GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "DeepSeek-V3": V3
    | {"first_k_dense_replace": 3, "n_routed_experts": 256, "num_attention_heads": 128, "vocab_size": 129280},
    "Kimi-K2": V3
    | {
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "vocab_size": 163840,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "vocab_size": 151552,
    },
    "Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 151936,
    },
    "Llama-30B": {
        "model_type": "llama",
        "hidden_size": 6656,
        "num_hidden_layers": 60,
        "intermediate_size": 17920,
        "num_attention_heads": 52,
        "vocab_size": 32000,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}

# total B, FFN B, attention B, embedding + head B, KV bytes per token in bf16
TABLE = {
    "Qwen3-30B-A3B": (30.53, 29.00, 0.906, 0.622, 98304),
    "GLM-4.7-Flash": (29.94, 28.29, 1.023, 0.634, 54144),
    "DeepSeek-V2-Lite": (15.71, 14.92, 0.372, 0.419, 31104),
    "Mixtral-8x7B": (46.70, 45.10, 1.342, 0.262, 131072),
    "OLMoE-1B-7B": (6.92, 6.44, 0.268, 0.206, 131072),
    "gpt-oss-20b": (20.91, 19.11, 0.637, 1.158, 49152),
    "gpt-oss-120b": (116.79, 114.68, 0.956, 1.158, 73728),
    "Qwen3-235B-A22B": (235.09, 227.15, 6.702, 1.245, 192512),
    "DeepSeek-V3": (671.03, 657.76, 11.413, 1.853, 70272),
    "Kimi-K2": (1026.4, 1017.9, 6.168, 2.349, 70272),
    "GLM-4.5-Air": (106.85, 100.59, 5.016, 1.242, 188416),
}
TOLERANCE = 1e-3


def build(name: str):
    return spec_from_config({"torch_dtype": "bfloat16", **CONFIGS[name]}, name)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_sizes_match_the_published_table(name):
    total, ffn, attention, embeddings, kv_bytes = TABLE[name]
    spec = build(name)
    assert spec.kv_bytes_per_token() == kv_bytes
    assert num_parameters(spec) / 1e9 == pytest.approx(total, rel=TOLERANCE)
    assert num_parameters(spec, "weights") / 1e9 == pytest.approx(ffn, rel=TOLERANCE)
    assert num_parameters(spec, "kv") / 1e9 == pytest.approx(attention + embeddings, rel=2 * TOLERANCE)
    assert num_parameters(spec, "kv") + num_parameters(spec, "weights") == num_parameters(spec)


@pytest.mark.parametrize(
    ("name", "kv_bytes", "total_billions"),
    [
        ("Qwen1.5-MoE-A2.7B", 24 * 2 * 16 * 128 * 2, 14.316),
        ("Llama-30B", 60 * 2 * 52 * 128 * 2, 32.529),
        ("Qwen3-32B", 64 * 2 * 8 * 128 * 2, 32.762),
    ],
)
def test_sizes_of_models_beside_the_table(name, kv_bytes, total_billions):
    """Totals as the authors publish them (14.3 B, 32.5 B, 32.8 B), here with the digits that the shapes give."""
    spec = build(name)
    assert spec.kv_bytes_per_token() == kv_bytes
    assert num_parameters(spec) / 1e9 == pytest.approx(total_billions, rel=TOLERANCE)


def test_bytes_count_router_tensors_in_float32():
    spec = build("GLM-4.7-Flash")
    router = sum(
        layer.ffn.num_experts * (spec.hidden_size + 1) for layer in spec.layers if isinstance(layer.ffn, MoEFFNSpec)
    )
    assert weight_bytes(spec) == 2 * num_parameters(spec) + 2 * router
    assert isinstance(spec.layers[0].ffn, DenseFFNSpec)
