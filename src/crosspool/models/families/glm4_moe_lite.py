"""GLM-4.7-Flash: MLA with interleaved rope, sigmoid router with correction bias, first layer dense."""

from crosspool.models.config_json import HFConfig, read_activation
from crosspool.models.families.blocks import build_spec, read_dense, read_mla, read_shared, sigmoid_router
from crosspool.models.families.family import Family
from crosspool.models.families.names import DENSE_NAMES, EXPERT_NAMES, MLA_NAMES, MOE_NAMES, NORM_NAMES
from crosspool.models.spec import ModelSpec, MoEFFNSpec


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
    width = config.integer("moe_intermediate_size", default=1536)
    dense = read_dense(config, 10240)
    moe = MoEFFNSpec(
        num_experts=config.integer("n_routed_experts", "num_local_experts", default=64),
        top_k=config.integer("num_experts_per_tok", default=4),
        expert_intermediate_size=width,
        router=sigmoid_router(config, num_groups=1, topk_groups=1, renormalise=True, scale=1.8),
        shared=read_shared(config, width, 1),
        activation=read_activation(config),
    )
    return build_spec(
        config,
        [attention] * num_layers,
        [dense if kind == "dense" else moe for kind in _layer_kinds(config, num_layers)],
        vocab_size=154880,
        hidden_size=2048,
        max_positions=202752,
        norm_eps=1e-5,
        eos=1,
        bos=0,
    )


def _layer_kinds(config: HFConfig, num_layers: int) -> tuple[str, ...]:
    """`mlp_layer_types`, else `first_k_dense_replace` leading dense layers (one where that is absent too)."""
    listed = config.per_layer("mlp_layer_types", num_layers, ("dense", "sparse"))
    if listed is not None:
        return listed
    num_dense = config.integer("first_k_dense_replace", default=1, minimum=0)
    return tuple("dense" if idx < num_dense else "sparse" for idx in range(num_layers))


FAMILY = Family(
    model_type="glm4_moe_lite",
    read_spec=read_spec,
    layer_names=NORM_NAMES | MLA_NAMES | DENSE_NAMES | MOE_NAMES,
    experts=EXPERT_NAMES,
)
