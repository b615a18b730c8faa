"""Attention of many shapes: random projections of it, what they become, and softmax over the cache in float64."""

from __future__ import annotations

import numpy as np
import torch

from crosspool.backends.cuda.kernels.rope import gqa_input, mla_input
from crosspool.backends.numpy.rotary import RotaryTable
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec, RopeSpec
from tests.backends.cuda.drawn import draw

ROPE = RopeSpec(theta=10000.0, dim=64)
INTERLEAVED = RopeSpec(theta=10000.0, dim=64, interleaved=True)


def gqa(heads, kv_heads, dim, **options):
    return GQASpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rope=ROPE, softmax_scale=dim**-0.5, **options)


def mla(heads, rope=ROPE):
    return MLASpec(
        num_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=rope,
        softmax_scale=192**-0.5,
    )


ATTENTIONS = {
    "gqa_d64": gqa(4, 2, 64, qk_norm="full"),
    "gqa_d128_group_of_8": gqa(16, 2, 128, qk_norm="head"),
    "gqa_d128_group_of_12": gqa(24, 2, 128),
    "gqa_d128_group_of_20": gqa(20, 1, 128),
    "gqa_d256": gqa(8, 2, 256, qk_norm="head"),
    "gqa_d128_interleaved": GQASpec(
        num_heads=8, num_kv_heads=1, head_dim=128, rope=INTERLEAVED, softmax_scale=0.09, qk_norm="head"
    ),
    "gqa_window_sinks": gqa(8, 1, 64, sliding_window=100, sinks=True),
    "mla_16_heads": mla(16),
    "mla_20_heads": mla(20, INTERLEAVED),
}


def one_layer_pages(spec, page_tokens):
    """Pages of one bf16 layer, each of which fills a frame."""
    return PageGeometry(
        num_layers=1,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=page_tokens,
        frame_bytes=page_tokens * spec.kv_elements_per_token * 2,
    )


def project(spec, rope, positions, rows=None):
    """Random projections; what they become in float64: queries (tokens, heads, D) and cache rows (tokens, row).

    rows: of four tokens, those that take part, in place of the first ones.
    """
    tokens = len(positions)
    num_drawn, rows = (tokens, slice(None)) if rows is None else (4, rows)
    if isinstance(spec, MLASpec):
        q_latent = draw(num_drawn, spec.num_heads, 512, seed=6)[rows].contiguous()
        q = draw(num_drawn, spec.num_heads * 192, seed=8)[rows].contiguous()
        kv_a = draw(num_drawn, 576, seed=9)[rows].contiguous()
        norm = draw(512, seed=10)
        inputs = mla_input(spec, rope, q_latent, q, kv_a, kv_a_norm=norm)
        turned = rotated(spec.rope, q.view(tokens, -1, 192)[..., 128:], positions)
        latent = rms(kv_a[:, :512].double(), spec.lora_norm_eps) * norm.double()
        key = rotated(spec.rope, kv_a[:, None, 512:], positions)[:, 0]
        queries = torch.cat([q_latent.double(), turned], dim=-1)
        return inputs, queries, torch.cat([latent, key], dim=-1), (q_latent, q, kv_a, norm)
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv = draw(num_drawn, (heads + 2 * kv_heads) * dim, seed=6)[rows].contiguous()
    q, k, v = qkv.double().split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    norms = [None, None]
    if spec.qk_norm != "none":
        widths = (heads * dim, kv_heads * dim) if spec.qk_norm == "full" else (dim, dim)
        norms = [draw(width, seed=8 + width) for width in widths]
        q, k = (
            (rms(x.view(tokens, -1, width), 1e-6) * norm.double()).reshape(tokens, -1)
            for x, width, norm in zip((q, k), widths, norms, strict=True)
        )
    inputs = gqa_input(spec, rope, qkv, q_norm=norms[0], k_norm=norms[1], eps=1e-6)
    q, k = (rotated(spec.rope, x.view(tokens, -1, dim), positions) for x in (q, k))
    return inputs, q, torch.cat([k.flatten(1), v], dim=-1), (qkv, *norms)


def rms(x, eps):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)


def rotated(rope, x, positions):
    """x (tokens, heads, D): its first rope.dim elements turned, in float64."""
    turns = torch.from_numpy(RotaryTable(rope).turns(positions.numpy().astype(np.int64))).to(torch.complex128)
    x, half = x.double().clone(), rope.dim // 2
    first, second = (
        (x[..., : rope.dim : 2], x[..., 1 : rope.dim : 2])
        if rope.interleaved
        else (
            x[..., :half],
            x[..., half : rope.dim],
        )
    )
    product = torch.complex(first, second) * turns
    first.copy_(product.real)
    second.copy_(product.imag)
    return x


def slot(cache, layer, row, token):
    geometry = cache.geometry
    page, at = divmod(token, geometry.page_tokens)
    frame = cache.frame_table[row, page, geometry.frame_of_layer(layer)]
    start = geometry.offset_of_layer(layer) // 2 + at * geometry.elements_per_token_layer
    return cache.frames.view(torch.bfloat16)[frame, start : start + geometry.elements_per_token_layer]


def fill(cache, layer, rows, lengths):
    geometry = cache.geometry
    frames = cache.frames.view(torch.bfloat16)
    for row, length in enumerate(lengths):
        for token in range(length):
            page, slot = divmod(token, geometry.page_tokens)
            frame = cache.frame_table[row, page, geometry.frame_of_layer(layer)]
            start = geometry.offset_of_layer(layer) // 2 + slot * geometry.elements_per_token_layer
            frames[frame, start : start + rows.shape[-1]] = rows[row, token]


def reference(spec, q, rows, sinks):
    q, rows = q.double(), rows.double()
    if isinstance(spec, MLASpec):
        keys = rows[:, None].expand(-1, spec.num_heads, -1)
        values = keys[..., : spec.kv_lora_rank]
    else:
        split = rows.view(len(rows), 2, spec.num_kv_heads, spec.head_dim)
        keys, values = split.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=2).unbind(1)
        if spec.sliding_window:
            keys, values = keys[-spec.sliding_window :], values[-spec.sliding_window :]
    scores = torch.einsum("hd,nhd->hn", q, keys) * spec.softmax_scale
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
    weights = scores.softmax(-1)[:, : len(keys)]
    return torch.einsum("hn,nhd->hd", weights, values)
