"""OLMoE: MHA with QK-norm over the full width, softmax router that is not renormalised."""

from crosspool.models.config_json import HFConfig, read_activation
from crosspool.models.families.blocks import build_spec, read_gqa
from crosspool.models.families.family import EXPERT_NAMES, GQA_NAMES, MOE_NAMES, NORM_NAMES, Family
from crosspool.models.spec import ModelSpec, MoEFFNSpec, RouterSpec


def read_spec(config: HFConfig) -> ModelSpec:
    """NOTE: `intermediate_size` is the width of one expert. `clip_qkv` is refused: no published model uses it."""
    config.supported("clip_qkv", config.get("clip_qkv"), (None,))
    num_layers = config.integer("num_hidden_layers", default=16)
    bias = config.flag("attention_bias", default=False)
    attention = read_gqa(
        config,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=None,
        max_positions=4096,
        qk_norm="full",
        qkv_bias=bias,
        o_bias=bias,
    )
    moe = MoEFFNSpec(
        num_experts=config.integer("num_experts", "num_local_experts", default=64),
        top_k=config.integer("num_experts_per_tok", default=8),
        expert_intermediate_size=config.integer("intermediate_size", default=2048),
        router=RouterSpec(score="softmax", renormalise=config.flag("norm_topk_prob", default=False)),
        activation=read_activation(config),
    )
    return build_spec(
        config,
        [attention] * num_layers,
        [moe] * num_layers,
        vocab_size=50304,
        hidden_size=2048,
        max_positions=4096,
        norm_eps=1e-5,
        eos=50279,
    )


FAMILY = Family(
    model_type="olmoe",
    read_spec=read_spec,
    layer_names=NORM_NAMES | GQA_NAMES | MOE_NAMES,
    experts=EXPERT_NAMES,
)
