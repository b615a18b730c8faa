"""One token through a whole model in float32, attention some pages at a time: what a very long request is judged by.

Plain torch over the same weights and the same cache. Rows are rounded to bf16 where the kernels round them (after a
norm, after projections, before `down`), so that what differs is how it was computed. GQA and softmax routers alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.kv_pool.cache_attention import layer_parts
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.loading.attention_weights import AttentionLayerWeights, GQAWeights
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.models.rope import inv_freq
from crosspool.models.spec import GQASpec, ModelSpec, MoEFFNSpec, RopeSpec

PAGES_AT_ONCE = 256


def token_logits(
    spec: ModelSpec,
    weights: AttentionWeights,
    ffn: Sequence[FFNLayerWeights],
    cache: PagedCache,
    token_id: int,
    position: int,
    num_slots: int | None = None,
) -> torch.Tensor:
    """(vocabulary) float32 of the token at `position`, over the first slots of row 0 and the token's own.

    num_slots: of the cache, `position` if not given. The cache is only read. ffn: where its weights lie.
    """
    count = position if num_slots is None else num_slots
    residual = weights.embed[token_id].float()
    for layer, (own, experts) in enumerate(zip(weights.layers, ffn, strict=True)):
        residual = residual + _attention(spec, own, cache, layer, residual, position, count)
        residual = residual + _experts(experts, _norm(residual, own.post_attention_norm, spec.norm_eps))
    return weights.head.float() @ _norm(residual, weights.final_norm, spec.norm_eps)


def _attention(
    spec: ModelSpec,
    weights: AttentionLayerWeights,
    cache: PagedCache,
    layer: int,
    residual: torch.Tensor,
    position: int,
    count: int,
) -> torch.Tensor:
    own, attention = weights.attention, weights.spec
    assert isinstance(own, GQAWeights)
    assert isinstance(attention, GQASpec)
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    qkv = _bf16(own.qkv.float() @ _norm(residual, weights.input_norm, spec.norm_eps)).view(-1, width)
    query, key, value = qkv.split([heads, kv_heads, kv_heads])
    if own.q_norm is not None and own.k_norm is not None:
        query, key = _scaled(query, own.q_norm, spec.norm_eps), _scaled(key, own.k_norm, spec.norm_eps)
    query, key = (_bf16(_turned(rows, attention.rope, position)) for rows in (query, key))
    found = attended(attention, cache, layer, query, key, value, count)
    return own.o.float() @ _bf16(found).view(-1)


def attended(
    spec: GQASpec,
    cache: PagedCache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """(heads, head_dim) float32: softmax over the first `count` slots of row 0 and the one of `key`, `value`."""
    heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
    grouped = query.view(kv_heads, heads // kv_heads, width) * spec.softmax_scale
    most = torch.einsum("kgd,kd->kg", grouped, key)[..., None]
    total = torch.ones_like(most)
    sums = value[:, None].expand(kv_heads, heads // kv_heads, width).clone()
    frames, page_tokens = cache.frames.view(torch.bfloat16), cache.geometry.page_tokens
    for first in range(0, cache.geometry.num_pages(count), PAGES_AT_ONCE):
        pages, part = layer_parts(cache, layer, slice(first, first + PAGES_AT_ONCE))
        rows = frames[pages, part].view(-1, 2, kv_heads, width)[: count - first * page_tokens].float()
        scores = torch.matmul(grouped, rows[:, 0].permute(1, 2, 0))
        peak = torch.maximum(most, scores.amax(2, keepdim=True))
        parts, scale = (scores - peak).exp(), (most - peak).exp()
        total = total * scale + parts.sum(2, keepdim=True)
        sums = sums * scale + torch.matmul(parts, rows[:, 1].transpose(0, 1))
        most = peak
    return (sums / total).view(heads, width)


def _experts(weights: FFNLayerWeights, rows: torch.Tensor) -> torch.Tensor:
    """rows: (hidden) float32 on any device; so is what comes back."""
    spec, router = weights.spec, weights.router
    assert isinstance(spec, MoEFFNSpec)
    assert spec.shared is None
    assert router is not None
    assert router.logit_bias is None
    assert weights.gate_up is not None
    assert weights.down is not None
    assert spec.router.score == "softmax"
    here = rows.to(weights.down.device)
    share, chosen = (router.weight @ here).softmax(0).topk(spec.top_k)
    share = share * spec.router.scale / (share.sum() if spec.router.renormalise else 1.0)
    gate, up = (weights.gate_up[chosen].float() @ here).view(spec.top_k, 2, -1).unbind(1)
    active = _bf16(torch.nn.functional.silu(gate) * up)
    return (share @ torch.einsum("ehw,ew->eh", weights.down[chosen].float(), active)).to(rows.device)


def _norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _bf16(_scaled(rows, weight, eps))


def _scaled(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def _turned(rows: torch.Tensor, rope: RopeSpec, position: int) -> torch.Tensor:
    """(heads, width) with the first `rope.dim` of each turned by the position's angles, which are float64."""
    assert not rope.interleaved
    angles = torch.from_numpy(np.remainder(position * inv_freq(rope), 2 * np.pi)).to(rows.device)
    cos, sin = angles.cos().float(), angles.sin().float()
    half = rope.dim // 2
    left, right, rest = rows.split([half, half, rows.shape[1] - rope.dim], dim=1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=1)


def _bf16(values: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16, as float32."""
    return values.bfloat16().float()
