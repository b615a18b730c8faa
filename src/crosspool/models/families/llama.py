"""Llama: dense, plain GQA; the baseline every other family deviates from."""

from crosspool.models.config_json import HFConfig
from crosspool.models.families.blocks import build_spec, read_dense, read_gqa
from crosspool.models.families.family import DENSE_NAMES, GQA_NAMES, NORM_NAMES, Family
from crosspool.models.spec import ModelSpec


def read_spec(config: HFConfig) -> ModelSpec:
    config.supported("mlp_bias", config.flag("mlp_bias", default=False), (False,))
    num_layers = config.integer("num_hidden_layers", default=32)
    bias = config.flag("attention_bias", default=False)
    attention = read_gqa(
        config,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=None,
        max_positions=2048,
        qkv_bias=bias,
        o_bias=bias,
    )
    return build_spec(
        config,
        [attention] * num_layers,
        [read_dense(config, 11008)] * num_layers,
        vocab_size=32000,
        hidden_size=4096,
        max_positions=2048,
        norm_eps=1e-6,
        eos=2,
    )


FAMILY = Family(model_type="llama", read_spec=read_spec, layer_names=NORM_NAMES | GQA_NAMES | DENSE_NAMES)
