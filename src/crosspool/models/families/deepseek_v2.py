"""DeepSeek-V2: MLA, softmax router without renormalisation, shared experts, leading dense layers."""

from crosspool.models.config_json import HFConfig, read_activation
from crosspool.models.families.blocks import build_spec, leading_dense, read_dense, read_mla, read_shared
from crosspool.models.families.family import DENSE_NAMES, EXPERT_NAMES, MLA_NAMES, MOE_NAMES, NORM_NAMES, Family
from crosspool.models.spec import ModelSpec, MoEFFNSpec, RouterSpec


def read_spec(config: HFConfig) -> ModelSpec:
    """NOTE: `norm_topk_prob: true` is refused: transformers ignores it, DeepSeek's own code renormalises."""
    config.supported("norm_topk_prob", config.flag("norm_topk_prob", default=False), (False,))
    config.supported("rope_interleave", config.flag("rope_interleave", default=True), (True,))
    config.supported("mlp_bias", config.flag("mlp_bias", default=False), (False,))
    num_layers = config.integer("num_hidden_layers", default=32)
    attention = read_mla(
        config,
        num_heads=32,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope=128,
        rope_dim=64,
        v=128,
        max_positions=2048,
        interleaved=True,
    )
    width = config.integer("moe_intermediate_size", default=1407)
    moe = MoEFFNSpec(
        num_experts=config.integer("n_routed_experts", "num_experts", default=64),
        top_k=config.integer("num_experts_per_tok"),
        expert_intermediate_size=width,
        router=_router(config),
        shared=read_shared(config, width, 2),
        activation=read_activation(config),
    )
    return build_spec(
        config,
        [attention] * num_layers,
        leading_dense(config, num_layers, default=0, dense=read_dense(config, 11008), moe=moe),
        vocab_size=102400,
        hidden_size=4096,
        max_positions=2048,
        norm_eps=1e-6,
        eos=2,
    )


def _router(config: HFConfig) -> RouterSpec:
    """`greedy` looks at all experts; `group_limited_greedy` only at those of the groups with the best single expert."""
    method = config.string("topk_method", default="greedy")
    config.supported("topk_method", method, ("greedy", "group_limited_greedy"))
    config.supported("scoring_func", config.string("scoring_func", default="softmax"), ("softmax",))
    is_grouped = method == "group_limited_greedy"
    return RouterSpec(
        score="softmax",
        num_groups=config.integer("n_group") if is_grouped else 1,
        topk_groups=config.integer("topk_group") if is_grouped else 1,
        group_score="max",
        scale=config.number("routed_scaling_factor", default=1.0),
    )


FAMILY = Family(
    model_type="deepseek_v2",
    read_spec=read_spec,
    layer_names=NORM_NAMES | MLA_NAMES | DENSE_NAMES | MOE_NAMES,
    experts=EXPERT_NAMES,
)
