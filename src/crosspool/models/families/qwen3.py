"""Qwen3: dense, GQA with QK-norm per head; windows in the last layers where `use_sliding_window` says so."""

from crosspool.models.config_json import HFConfig
from crosspool.models.families.blocks import (
    build_spec,
    qwen_window,
    read_dense,
    read_gqa,
    window_per_layer,
)
from crosspool.models.families.family import DENSE_NAMES, GQA_NAMES, NORM_NAMES, Family
from crosspool.models.spec import GQASpec, ModelSpec


def read_spec(config: HFConfig) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers", default=32)
    return build_spec(
        config,
        [_attention(config, window) for window in _windows(config, num_layers)],
        [read_dense(config, 22016)] * num_layers,
        vocab_size=151936,
        hidden_size=4096,
        max_positions=32768,
        norm_eps=1e-6,
    )


def _attention(config: HFConfig, window: int | None) -> GQASpec:
    bias = config.flag("attention_bias", default=False)
    return read_gqa(
        config,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        max_positions=32768,
        head_dim=128,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        sliding_window=window,
    )


def _windows(config: HFConfig, num_layers: int) -> list[int | None]:
    """Where windows are in use, the layers from `max_window_layers` on slide."""
    window = qwen_window(config)
    first = config.integer("max_window_layers", default=28, minimum=0)
    slides = [window is not None and idx >= first for idx in range(num_layers)]
    return window_per_layer(config, window, slides)


FAMILY = Family(model_type="qwen3", read_spec=read_spec, layer_names=NORM_NAMES | GQA_NAMES | DENSE_NAMES)
