"""Attention of one whole sequence by its definition: float64, loops over heads and tokens, no cache, no paging."""

import numpy as np

from crosspool.models.rope import attention_factor, inv_freq
from crosspool.models.spec import GQASpec, MLASpec, RopeSpec


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def turn(x, rope: RopeSpec):
    """(tokens, ..., width) with the first `rope.dim` elements of token t turned to position t."""
    half = rope.dim // 2
    angles = np.arange(len(x))[:, None] * inv_freq(rope)
    angles = angles.reshape(len(x), *(1,) * (x.ndim - 2), half)
    cos, sin = np.cos(angles) * attention_factor(rope), np.sin(angles) * attention_factor(rope)
    first = np.arange(half) * 2 if rope.interleaved else np.arange(half)
    second = first + 1 if rope.interleaved else first + half
    result = x.copy()
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def softmax_attention(query, key, value, scale, window=None, sink=None):
    """One head: (tokens, D), (tokens, D), (tokens, V)."""
    result = np.zeros((len(query), value.shape[1]))
    for token in range(len(query)):
        begin = 0 if window is None else max(0, token - window + 1)
        scores = key[begin : token + 1] @ query[token] * scale
        exp = np.exp(scores)
        total = exp.sum() + (0 if sink is None else np.exp(sink))
        result[token] = exp @ value[begin : token + 1] / total
    return result


def plain_gqa(spec: GQASpec, weights, x, eps):
    """(tokens, hidden) from the normed x (tokens, hidden)."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    q, k, v = (x @ w[name].T + w.get(f"{name}_bias", 0) for name in "qkv")
    if spec.qk_norm == "full":
        q, k = rms(q, w["q_norm"], eps), rms(k, w["k_norm"], eps)
    q, k, v = (part.reshape(len(x), -1, spec.head_dim) for part in (q, k, v))
    if spec.qk_norm == "head":
        q, k = rms(q, w["q_norm"], eps), rms(k, w["k_norm"], eps)
    q, k = turn(q, spec.rope), turn(k, spec.rope)
    heads = []
    for head in range(spec.num_heads):
        own = head * spec.num_kv_heads // spec.num_heads
        sink = w["sinks"][head] if spec.sinks else None
        heads.append(softmax_attention(q[:, head], k[:, own], v[:, own], spec.softmax_scale, spec.sliding_window, sink))
    return np.concatenate(heads, axis=1) @ w["o"].T + w.get("o_bias", 0)


def plain_mla(spec: MLASpec, weights, x):
    """(tokens, hidden) from the normed x (tokens, hidden): keys and values of every head, expanded."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    nope, lora = spec.qk_nope_head_dim, spec.kv_lora_rank
    if spec.q_lora_rank is None:
        q = x @ w["q"].T
    else:
        q = rms(x @ w["q_a"].T + w.get("q_a_bias", 0), w["q_a_norm"], spec.lora_norm_eps) @ w["q_b"].T
    q = q.reshape(len(x), spec.num_heads, -1)
    latent = x @ w["kv_a"].T + w.get("kv_a_bias", 0)
    rope_key = turn(latent[:, None, lora:], spec.rope)[:, 0]
    kv = (rms(latent[:, :lora], w["kv_a_norm"], spec.lora_norm_eps) @ w["kv_b"].T).reshape(len(x), spec.num_heads, -1)
    heads = []
    for head in range(spec.num_heads):
        query = np.concatenate([q[:, head, :nope], turn(q[:, head, None, nope:], spec.rope)[:, 0]], axis=1)
        key = np.concatenate([kv[:, head, :nope], rope_key], axis=1)
        heads.append(softmax_attention(query, key, kv[:, head, nope:], spec.softmax_scale))
    return np.concatenate(heads, axis=1) @ w["o"].T + w.get("o_bias", 0)
