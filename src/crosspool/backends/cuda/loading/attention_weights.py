"""One layer's attention weights as the kernels read them: projections of the same input stacked, MLA's absorbed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from crosspool.models.spec import GQASpec, MLASpec


@dataclass(frozen=True, kw_only=True)
class GQAWeights:
    """qkv: (heads * D + 2 * kv_heads * D, hidden): q rows, k rows, v rows."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class MLAWeights:
    """down: (q_lora or heads * D_qk, then kv_lora + rope; hidden). key_up: (heads, kv_lora, nope), which turns the
    nope part of a query into one that scores latents. value_up: (heads, v, kv_lora)."""

    down: torch.Tensor
    down_bias: torch.Tensor | None
    q_a_norm: torch.Tensor | None
    q_b: torch.Tensor | None
    kv_a_norm: torch.Tensor
    key_up: torch.Tensor
    value_up: torch.Tensor
    o: torch.Tensor
    o_bias: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class AttentionLayerWeights:
    """spec and weights of one layer's attention half."""

    spec: GQASpec | MLASpec
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    attention: GQAWeights | MLAWeights


def pack_attention(spec: GQASpec | MLASpec, tensors: Mapping[str, torch.Tensor]) -> AttentionLayerWeights:
    """Canonical tensors of one layer (bf16, on the device), stacked; the originals may be dropped afterwards."""
    attention = _pack_mla(spec, tensors) if isinstance(spec, MLASpec) else _pack_gqa(tensors)
    return AttentionLayerWeights(
        spec=spec,
        input_norm=tensors["input_norm"],
        post_attention_norm=tensors["post_attention_norm"],
        attention=attention,
    )


def _pack_gqa(tensors: Mapping[str, torch.Tensor]) -> GQAWeights:
    bias = torch.cat([tensors[name] for name in ("q_bias", "k_bias", "v_bias")]) if "q_bias" in tensors else None
    return GQAWeights(
        qkv=torch.cat([tensors["q"], tensors["k"], tensors["v"]]),
        qkv_bias=bias,
        q_norm=tensors.get("q_norm"),
        k_norm=tensors.get("k_norm"),
        sinks=tensors.get("sinks"),
        o=tensors["o"],
        o_bias=tensors.get("o_bias"),
    )


def _pack_mla(spec: MLASpec, tensors: Mapping[str, torch.Tensor]) -> MLAWeights:
    first = tensors["q"] if spec.q_lora_rank is None else tensors["q_a"]
    bias = None
    if "kv_a_bias" in tensors:
        first_bias = tensors.get("q_a_bias", torch.zeros_like(first[:, 0]))
        bias = torch.cat([first_bias, tensors["kv_a_bias"]])
    up = tensors["kv_b"].view(spec.num_heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank)
    return MLAWeights(
        down=torch.cat([first, tensors["kv_a"]]),
        down_bias=bias,
        q_a_norm=tensors.get("q_a_norm"),
        q_b=tensors.get("q_b"),
        kv_a_norm=tensors["kv_a_norm"],
        key_up=up[:, : spec.qk_nope_head_dim].transpose(1, 2).contiguous(),
        value_up=up[:, spec.qk_nope_head_dim :].contiguous(),
        o=tensors["o"],
        o_bias=tensors.get("o_bias"),
    )
