"""GLM-4.5: GQA with partial rope, sigmoid router with correction bias, leading dense layers."""

from crosspool.models.config_json import HFConfig
from crosspool.models.families.blocks import build_spec, leading_dense, read_dense, read_gqa, read_moe, sigmoid_router
from crosspool.models.families.family import DENSE_NAMES, EXPERT_NAMES, GQA_NAMES, MOE_NAMES, NORM_NAMES, Family
from crosspool.models.spec import ModelSpec


def read_spec(config: HFConfig) -> ModelSpec:
    """NOTE: `attention_bias` covers q, k and v, never o."""
    num_layers = config.integer("num_hidden_layers", default=46)
    attention = read_gqa(
        config,
        hidden_size=4096,
        num_heads=96,
        num_kv_heads=8,
        max_positions=131072,
        partial_factor=0.5,
        qk_norm="head" if config.flag("use_qk_norm", default=False) else "none",
        qkv_bias=config.flag("attention_bias", default=False),
    )
    router = sigmoid_router(config, num_groups=1, topk_groups=1, renormalise=True, scale=1.0)
    moe = read_moe(config, router, num_experts=128, top_k=8, width=1408)
    return build_spec(
        config,
        [attention] * num_layers,
        leading_dense(config, num_layers, default=1, dense=read_dense(config, 10944), moe=moe),
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
