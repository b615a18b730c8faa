"""DeepSeek-V3: MLA with query compression, sigmoid router with correction bias over groups, leading dense layers."""

from crosspool.models.config_json import HFConfig, read_activation
from crosspool.models.families.blocks import build_spec, read_dense, read_mla, read_shared, sigmoid_router
from crosspool.models.families.family import Family
from crosspool.models.families.names import DENSE_NAMES, EXPERT_NAMES, MLA_NAMES, MOE_NAMES, NORM_NAMES
from crosspool.models.spec import ModelSpec, MoEFFNSpec


def read_spec(config: HFConfig) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers", default=61)
    num_dense = config.integer("first_k_dense_replace", default=3, minimum=0)
    attention = read_mla(
        config,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope=128,
        rope_dim=64,
        v=128,
        max_positions=4096,
        interleaved=config.flag("rope_interleave", default=True),
    )
    width = config.integer("moe_intermediate_size", default=2048)
    dense = read_dense(config, 18432)
    moe = MoEFFNSpec(
        num_experts=config.integer("n_routed_experts", "num_local_experts", default=256),
        top_k=config.integer("num_experts_per_tok", default=8),
        expert_intermediate_size=width,
        router=sigmoid_router(config, num_groups=8, topk_groups=4, renormalise=True, scale=2.5),
        shared=read_shared(config, width, 1),
        activation=read_activation(config),
    )
    return build_spec(
        config,
        [attention] * num_layers,
        [dense if idx < num_dense else moe for idx in range(num_layers)],
        vocab_size=129280,
        hidden_size=7168,
        max_positions=4096,
        norm_eps=1e-6,
        eos=1,
        bos=0,
    )


FAMILY = Family(
    model_type="deepseek_v3",
    read_spec=read_spec,
    layer_names=NORM_NAMES | MLA_NAMES | DENSE_NAMES | MOE_NAMES,
    experts=EXPERT_NAMES,
)
