"""Qwen3-MoE: GQA with QK-norm per head, softmax router, renormalised in the published checkpoints only."""

from crosspool.models.config_json import HFConfig, read_activation
from crosspool.models.families.blocks import (
    build_spec,
    qwen_sparse_layers,
    qwen_window,
    read_dense,
    read_gqa,
)
from crosspool.models.families.family import DENSE_NAMES, EXPERT_NAMES, GQA_NAMES, MOE_NAMES, NORM_NAMES, Family
from crosspool.models.spec import ModelSpec, MoEFFNSpec, RouterSpec


def read_spec(config: HFConfig) -> ModelSpec:
    """NOTE: `norm_topk_prob` defaults to false here, as in transformers; checkpoints say true."""
    num_layers = config.integer("num_hidden_layers", default=24)
    bias = config.flag("attention_bias", default=False)
    attention = read_gqa(
        config,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        max_positions=32768,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        sliding_window=qwen_window(config),
    )
    num_experts = config.integer("num_experts", "num_local_experts", default=128, minimum=0)
    sparse = qwen_sparse_layers(config, num_layers, num_experts)
    dense = read_dense(config, 6144)
    moe = MoEFFNSpec(
        num_experts=num_experts,
        top_k=config.integer("num_experts_per_tok", default=8),
        expert_intermediate_size=config.integer("moe_intermediate_size", default=768),
        router=RouterSpec(score="softmax", renormalise=config.flag("norm_topk_prob", default=False)),
        activation=read_activation(config),
    )
    return build_spec(
        config,
        [attention] * num_layers,
        [moe if is_sparse else dense for is_sparse in sparse],
        vocab_size=151936,
        hidden_size=2048,
        max_positions=32768,
        norm_eps=1e-6,
    )


FAMILY = Family(
    model_type="qwen3_moe",
    read_spec=read_spec,
    layer_names=NORM_NAMES | GQA_NAMES | DENSE_NAMES | MOE_NAMES,
    experts=EXPERT_NAMES,
)
