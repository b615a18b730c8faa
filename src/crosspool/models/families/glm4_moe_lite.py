"""GLM-4.7-Flash: MLA with interleaved rope, sigmoid router with correction bias, first layer dense."""

from crosspool.models.config_json import HFConfig
from crosspool.models.families.blocks import (
    FFNSpec,
    build_spec,
    leading_dense,
    read_dense,
    read_mla,
    read_moe,
    sigmoid_router,
)
from crosspool.models.families.family import DENSE_NAMES, EXPERT_NAMES, MLA_NAMES, MOE_NAMES, NORM_NAMES, Family
from crosspool.models.spec import DenseFFNSpec, ModelSpec, MoEFFNSpec


def read_spec(config: HFConfig) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers", default=47)
    attention = read_mla(
        config,
        num_heads=20,
        q_lora_rank=768,
        kv_lora_rank=512,
        nope=192,
        rope_dim=64,
        v=256,
        max_positions=202752,
        interleaved=config.flag("rope_interleave", default=True),
    )
    router = sigmoid_router(config, num_groups=1, topk_groups=1, renormalise=True, scale=1.8)
    moe = read_moe(config, router, num_experts=64, top_k=4, width=1536)
    return build_spec(
        config,
        [attention] * num_layers,
        _layers(config, num_layers, read_dense(config, 10240), moe),
        vocab_size=154880,
        hidden_size=2048,
        max_positions=202752,
        norm_eps=1e-5,
        eos=1,
    )


def _layers(config: HFConfig, num_layers: int, dense: DenseFFNSpec, moe: MoEFFNSpec) -> list[FFNSpec]:
    """As `mlp_layer_types` lists them, else dense ones first (one where no field says how many)."""
    kinds = config.per_layer("mlp_layer_types", num_layers, ("dense", "sparse"))
    if kinds is None:
        return leading_dense(config, num_layers, default=1, dense=dense, moe=moe)
    return [dense if kind == "dense" else moe for kind in kinds]


FAMILY = Family(
    model_type="glm4_moe_lite",
    read_spec=read_spec,
    layer_names=NORM_NAMES | MLA_NAMES | DENSE_NAMES | MOE_NAMES,
    experts=EXPERT_NAMES,
)
