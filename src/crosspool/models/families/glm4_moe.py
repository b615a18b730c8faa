"""GLM-4.5: GQA with partial rope, sigmoid router with correction bias, leading dense layers."""

from crosspool.models.config_json import HFConfig, read_activation
from crosspool.models.families.blocks import (
    build_spec,
    read_dense,
    read_gqa,
    read_head_dim,
    read_shared,
    sigmoid_router,
)
from crosspool.models.families.family import Family
from crosspool.models.families.names import DENSE_NAMES, EXPERT_NAMES, GQA_NAMES, MOE_NAMES, NORM_NAMES
from crosspool.models.rope_config import read_rope
from crosspool.models.spec import ModelSpec, MoEFFNSpec


def read_spec(config: HFConfig) -> ModelSpec:
    """NOTE: `attention_bias` covers q, k and v, never o."""
    num_layers = config.integer("num_hidden_layers", default=46)
    num_dense = config.integer("first_k_dense_replace", default=1, minimum=0)
    head_dim = read_head_dim(config, hidden_size=4096, num_heads=96)
    positions = config.integer("max_position_embeddings", default=131072)
    attention = read_gqa(
        config,
        read_rope(config, head_dim=head_dim, max_positions=positions, default_partial_factor=0.5),
        num_heads=96,
        num_kv_heads=8,
        head_dim=head_dim,
        qk_norm="head" if config.flag("use_qk_norm", default=False) else "none",
        qkv_bias=config.flag("attention_bias", default=False),
    )
    width = config.integer("moe_intermediate_size", default=1408)
    dense = read_dense(config, 10944)
    moe = MoEFFNSpec(
        num_experts=config.integer("n_routed_experts", "num_local_experts", default=128),
        top_k=config.integer("num_experts_per_tok", default=8),
        expert_intermediate_size=width,
        router=sigmoid_router(config, num_groups=1, topk_groups=1, renormalise=True, scale=1.0),
        shared=read_shared(config, width, 1),
        activation=read_activation(config),
    )
    return build_spec(
        config,
        [attention] * num_layers,
        [dense if idx < num_dense else moe for idx in range(num_layers)],
        vocab_size=151552,
        hidden_size=4096,
        max_positions=131072,
        norm_eps=1e-5,
    )


FAMILY = Family(
    model_type="glm4_moe",
    read_spec=read_spec,
    layer_names=NORM_NAMES | GQA_NAMES | DENSE_NAMES | MOE_NAMES,
    experts=EXPERT_NAMES,
)
