"""DeepSeek-V3: MLA with query compression, sigmoid router with correction bias over groups, leading dense layers."""

from crosspool.models.config_json import HFConfig
from crosspool.models.families.blocks import build_spec, leading_dense, read_dense, read_mla, read_moe, sigmoid_router
from crosspool.models.families.family import DENSE_NAMES, EXPERT_NAMES, MLA_NAMES, MOE_NAMES, NORM_NAMES, Family
from crosspool.models.spec import ModelSpec


def read_spec(config: HFConfig) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers", default=61)
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
    router = sigmoid_router(config, num_groups=8, topk_groups=4, renormalise=True, scale=2.5)
    moe = read_moe(config, router, num_experts=256, top_k=8, width=2048)
    return build_spec(
        config,
        [attention] * num_layers,
        leading_dense(config, num_layers, default=3, dense=read_dense(config, 18432), moe=moe),
        vocab_size=129280,
        hidden_size=7168,
        max_positions=4096,
        norm_eps=1e-6,
        eos=1,
    )


FAMILY = Family(
    model_type="deepseek_v3",
    read_spec=read_spec,
    layer_names=NORM_NAMES | MLA_NAMES | DENSE_NAMES | MOE_NAMES,
    experts=EXPERT_NAMES,
)
