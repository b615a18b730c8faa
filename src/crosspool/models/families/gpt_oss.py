"""gpt-oss: attention sinks, a window in every other layer, biases everywhere, clamped SwiGLU, fused expert files."""

from crosspool.models.config_json import HFConfig, read_activation
from crosspool.models.families.blocks import build_spec, read_gqa, read_window, window_per_layer
from crosspool.models.families.family import GQA_NAMES, NORM_NAMES, ExpertNames, Family
from crosspool.models.spec import GQASpec, ModelSpec, MoEFFNSpec, RouterSpec

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_spec(config: HFConfig) -> ModelSpec:
    """NOTE: `intermediate_size` is the width of one expert."""
    read_activation(config)
    config.supported("swiglu_alpha", config.number("swiglu_alpha", default=1.702), (1.702,))
    config.supported("swiglu_limit", config.number("swiglu_limit", default=7.0), (7.0,))
    num_layers = config.integer("num_hidden_layers", default=36)
    slides = [idx % 2 == 0 for idx in range(num_layers)]
    windows = window_per_layer(config, read_window(config, default=128), slides)
    moe = MoEFFNSpec(
        num_experts=config.integer("num_local_experts", "num_experts", default=128),
        top_k=config.integer("num_experts_per_tok", default=4),
        expert_intermediate_size=config.integer("intermediate_size", default=2880),
        router=RouterSpec(score="softmax_of_topk", logit_bias=True),
        activation="gpt_oss_swiglu",
        expert_bias=True,
    )
    return build_spec(
        config,
        [_attention(config, window) for window in windows],
        [moe] * num_layers,
        vocab_size=201088,
        hidden_size=2880,
        max_positions=131072,
        norm_eps=1e-5,
    )


def _attention(config: HFConfig, window: int | None) -> GQASpec:
    bias = config.flag("attention_bias", default=True)
    return read_gqa(
        config,
        hidden_size=2880,
        num_heads=64,
        num_kv_heads=8,
        max_positions=131072,
        head_dim=64,
        theta=150000.0,
        rope_parameters=_DEFAULT_ROPE,
        qkv_bias=bias,
        o_bias=bias,
        sliding_window=window,
        sinks=True,
    )


FAMILY = Family(
    model_type="gpt_oss",
    read_spec=read_spec,
    layer_names=NORM_NAMES | GQA_NAMES | {"router": ("mlp.router.weight",), "router_bias": ("mlp.router.bias",)},
    experts=ExpertNames(
        fused={
            "expert_gate_up": "mlp.experts.gate_up_proj",
            "expert_gate_up_bias": "mlp.experts.gate_up_proj_bias",
            "expert_down": "mlp.experts.down_proj",
            "expert_down_bias": "mlp.experts.down_proj_bias",
        },
        fused_region="fused_columns",
    ),
)
