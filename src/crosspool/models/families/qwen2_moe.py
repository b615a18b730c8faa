"""Qwen2-MoE (Qwen1.5-MoE): QKV biases, softmax router, one shared expert behind a sigmoid gate."""

from crosspool.models.config_json import HFConfig, read_activation
from crosspool.models.families.blocks import (
    build_spec,
    qwen_sparse_layers,
    qwen_window,
    read_dense,
    read_gqa,
    window_per_layer,
)
from crosspool.models.families.family import DENSE_NAMES, EXPERT_NAMES, GQA_NAMES, NORM_NAMES, Family
from crosspool.models.spec import GQASpec, ModelSpec, MoEFFNSpec, RouterSpec, SharedExpertSpec


def read_spec(config: HFConfig) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers", default=24)
    num_experts = config.integer("num_experts", "num_local_experts", default=60, minimum=0)
    dense = read_dense(config, 5632)
    moe = MoEFFNSpec(
        num_experts=num_experts,
        top_k=config.integer("num_experts_per_tok", default=4),
        expert_intermediate_size=config.integer("moe_intermediate_size", default=1408),
        router=RouterSpec(score="softmax", renormalise=config.flag("norm_topk_prob", default=False)),
        shared=SharedExpertSpec(
            intermediate_size=config.integer("shared_expert_intermediate_size", default=5632), gated=True
        ),
        activation=read_activation(config),
    )
    sparse = qwen_sparse_layers(config, num_layers, num_experts)
    return build_spec(
        config,
        [_attention(config, window) for window in _windows(config, num_layers)],
        [moe if is_sparse else dense for is_sparse in sparse],
        vocab_size=151936,
        hidden_size=2048,
        max_positions=32768,
        norm_eps=1e-6,
    )


def _attention(config: HFConfig, window: int | None) -> GQASpec:
    return read_gqa(
        config,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=16,
        max_positions=32768,
        qkv_bias=config.flag("qkv_bias", default=True),
        sliding_window=window,
    )


def _windows(config: HFConfig, num_layers: int) -> list[int | None]:
    """Where windows are in use, every other layer of the first `max_window_layers` slides, the first one included."""
    is_used, window = config.flag("use_sliding_window", default=False), qwen_window(config)
    last = config.integer("max_window_layers", default=28, minimum=0)
    slides = [is_used and idx % 2 == 0 and idx < last for idx in range(num_layers)]
    return window_per_layer(config, window, slides)


FAMILY = Family(
    model_type="qwen2_moe",
    read_spec=read_spec,
    layer_names=NORM_NAMES
    | GQA_NAMES
    | DENSE_NAMES
    | {
        "router": ("mlp.gate.weight",),
        "shared_gate": ("mlp.shared_expert.gate_proj.weight",),
        "shared_up": ("mlp.shared_expert.up_proj.weight",),
        "shared_down": ("mlp.shared_expert.down_proj.weight",),
        "shared_expert_gate": ("mlp.shared_expert_gate.weight",),
    },
    experts=EXPERT_NAMES,
)
