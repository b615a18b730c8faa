"""Random valid configs of every family, over all fields that change what a model computes; tiny, seeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np

Config = dict[str, Any]


class Draws:
    """Choices of one seeded generator, another for each family."""

    def __init__(self, family: str, seed: int) -> None:
        self._rng = np.random.default_rng([seed, crc32(family.encode())])

    def one_of(self, *values: Any) -> Any:
        return values[int(self._rng.integers(len(values)))]

    def number(self, low: float, high: float) -> float:
        return round(float(self._rng.uniform(low, high)), 4)

    def integer(self, low: int, high: int) -> int:
        """Both ends included."""
        return int(self._rng.integers(low, high + 1))


def drawn_config(family: str, seed: int) -> Config:
    """Overrides for `tiny_config`, in the hub's spelling; an Ellipsis removes a field."""
    draws = Draws(family, seed)
    config: Config = {
        "hidden": draws.one_of(32, 48, 64, 96),
        "num_layers": draws.integer(1, 4),
        "vocab_size": draws.one_of(37, 64, 211),
        "rms_norm_eps": draws.one_of(1e-6, 1e-5, 1e-2),
        "tie_word_embeddings": draws.one_of(False, False, True),
        "rope_theta": draws.one_of(100.0, 10000.0, 1e6),
        "max_position_embeddings": draws.one_of(64, 256, 4096),
        "intermediate_size": draws.one_of(16, 40, 96),
        "hidden_act": draws.one_of("silu", "swish"),
        "eos_token_id": draws.one_of(0, [1, 2], None),
    }
    config |= _rope_scaling(draws, config["max_position_embeddings"])
    return config | _FAMILIES[family](draws, config)


def _rope_scaling(draws: Draws, max_positions: int) -> Config:
    kind = draws.one_of("none", "none", "linear", "llama3", "yarn", "yarn")
    original = draws.one_of(16, 32, 64)
    if kind == "none":
        return {"rope_scaling": None}
    if kind == "linear":
        return {"rope_scaling": {draws.one_of("type", "rope_type"): kind, "factor": draws.number(1, 8)}}
    scaling: Config = {"rope_type": kind, "factor": draws.number(1, 16), "original_max_position_embeddings": original}
    if kind == "llama3":
        return {"rope_scaling": {**scaling, "low_freq_factor": 1.0, "high_freq_factor": draws.one_of(2.0, 4.0)}}
    if draws.one_of(True, False):
        scaling |= {"beta_fast": draws.number(4, 40), "beta_slow": draws.number(0.5, 3)}
    if draws.one_of(True, False):
        scaling["truncate"] = draws.one_of(True, False)
    extras = draws.one_of("none", "both", "mscale", "all_dim", "factor")
    if extras in ("both", "mscale"):
        scaling["mscale"] = draws.number(0.5, 1.5)
    if extras in ("both", "all_dim"):
        scaling["mscale_all_dim"] = draws.number(0.5, 1.5)
    if extras == "factor":
        scaling["attention_factor"] = draws.number(0.5, 2)
    if draws.one_of(True, False, False):
        scaling["original_max_position_embeddings"] = max_positions
    return {"rope_scaling": scaling}


def _heads(draws: Draws, hidden: int, *, is_free: bool = True) -> Config:
    """Heads that divide the hidden size; a head width of its own where the family has one."""
    heads = draws.one_of(*(count for count in (1, 2, 3, 4, 6, 8) if hidden % count == 0 and hidden // count % 2 == 0))
    kv_heads = draws.one_of(*(count for count in (1, 2, 3, 4, 6, 8) if heads % count == 0))
    width = draws.one_of(8, 20, 32, 64) if is_free and draws.one_of(True, False) else ...
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}


def _experts(draws: Draws, name: str) -> Config:
    experts = draws.one_of(1, 4, 8, 12)
    return {name: experts, "num_experts_per_tok": draws.integer(1, min(experts, 8))}


def _mla(draws: Draws) -> Config:
    heads = draws.one_of(1, 2, 4)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draws.one_of(None, 24, 40),
        "kv_lora_rank": draws.one_of(16, 40),
        "qk_nope_head_dim": draws.one_of(8, 24),
        "qk_rope_head_dim": draws.one_of(4, 16),
        "v_head_dim": draws.one_of(8, 20),
        "attention_bias": draws.one_of(False, True),
        "moe_intermediate_size": draws.one_of(16, 40),
        "n_shared_experts": draws.integer(1, 3),
        "first_k_dense_replace": draws.integer(0, 3),
        "routed_scaling_factor": draws.number(0.5, 4),
    }


def _groups(draws: Draws) -> Config:
    """Experts in groups of two or more, and at most so many for each token as the chosen groups have."""
    groups = draws.one_of(1, 2, 4)
    each = draws.integer(2, 4)
    topk_groups = draws.integer(1, groups)
    return {
        "n_group": groups,
        "topk_group": topk_groups,
        "n_routed_experts": groups * each,
        "num_experts_per_tok": draws.integer(1, topk_groups * each),
    }


def _llama(draws: Draws, config: Config) -> Config:
    return {**_heads(draws, config["hidden"]), "attention_bias": draws.one_of(False, True)}


def _window(draws: Draws) -> Config:
    is_used = draws.one_of(False, True)
    return {
        "use_sliding_window": is_used,
        "sliding_window": draws.one_of(3, 7, 30) if is_used else draws.one_of(None, 5),
        "max_window_layers": draws.integer(0, 4),
    }


def _layer_types(draws: Draws, num_layers: int) -> Config:
    if draws.one_of(True, True, False):
        return {}
    return {"layer_types": [draws.one_of("full_attention", "sliding_attention") for _ in range(num_layers)]}


def _qwen3(draws: Draws, config: Config) -> Config:
    window = _window(draws)
    kinds = _layer_types(draws, config["num_layers"]) if window["use_sliding_window"] else {}
    return {**_llama(draws, config), **window, **kinds}


def _sparse(draws: Draws) -> Config:
    return {
        "decoder_sparse_step": draws.one_of(1, 1, 2),
        "mlp_only_layers": draws.one_of([], [0], [1, 2], None),
        "moe_intermediate_size": draws.one_of(16, 40),
        "norm_topk_prob": draws.one_of(False, True),
    }


def _qwen3_moe(draws: Draws, config: Config) -> Config:
    return {**_llama(draws, config), **_window(draws), **_sparse(draws), **_experts(draws, "num_experts")}


def _qwen2_moe(draws: Draws, config: Config) -> Config:
    window = _window(draws)
    kinds = _layer_types(draws, config["num_layers"]) if window["use_sliding_window"] else {}
    return {
        **_heads(draws, config["hidden"]),
        **window,
        **kinds,
        **_sparse(draws),
        **_experts(draws, "num_experts"),
        "qkv_bias": draws.one_of(False, True),
        "shared_expert_intermediate_size": draws.one_of(16, 56),
    }


def _mixtral(draws: Draws, config: Config) -> Config:
    """NOTE: under yarn transformers wants the width of heads spelled out."""
    heads = _heads(draws, config["hidden"])
    if heads["head_dim"] is ...:
        heads["head_dim"] = config["hidden"] // heads["num_attention_heads"]
    return {
        **heads,
        **_experts(draws, "num_local_experts"),
        "sliding_window": draws.one_of(None, 3, 20),
    }


def _olmoe(draws: Draws, config: Config) -> Config:
    return {
        **_heads(draws, config["hidden"], is_free=False),
        **_experts(draws, "num_experts"),
        "attention_bias": draws.one_of(False, True),
        "norm_topk_prob": draws.one_of(False, True),
    }


def _deepseek_v2(draws: Draws, config: Config) -> Config:
    is_grouped = draws.one_of(False, True)
    experts = _groups(draws) if is_grouped else _experts(draws, "n_routed_experts")
    method = "group_limited_greedy" if is_grouped else "greedy"
    return {**_mla(draws), **experts, "topk_method": method}


def _deepseek_v3(draws: Draws, config: Config) -> Config:
    return {
        **_mla(draws),
        **_groups(draws),
        "norm_topk_prob": draws.one_of(False, True),
        "rope_interleave": draws.one_of(True, False, ...),
    }


def _glm4_moe_lite(draws: Draws, config: Config) -> Config:
    """NOTE: transformers looks at `mlp_layer_types` alone, and takes one dense layer where it is absent."""
    kinds = [draws.one_of("dense", "sparse") for _ in range(config["num_layers"])]
    layers = draws.one_of({"first_k_dense_replace": 1}, {"mlp_layer_types": kinds})
    return {**_deepseek_v3(draws, config), "first_k_dense_replace": ..., **layers}


def _glm4_moe(draws: Draws, config: Config) -> Config:
    heads = _heads(draws, config["hidden"])
    width = config["hidden"] // heads["num_attention_heads"] if heads["head_dim"] is ... else heads["head_dim"]
    partial = draws.one_of(*(part for part in (0.25, 0.5, 1.0) if int(width * part) % 2 == 0 and width * part >= 2))
    return {
        **heads,
        **_groups(draws),
        "partial_rotary_factor": partial,
        "attention_bias": draws.one_of(False, True),
        "use_qk_norm": draws.one_of(False, True),
        "moe_intermediate_size": draws.one_of(16, 40),
        "n_shared_experts": draws.integer(1, 2),
        "first_k_dense_replace": draws.integer(0, 3),
        "norm_topk_prob": draws.one_of(False, True),
        "routed_scaling_factor": draws.number(0.5, 4),
    }


def _gpt_oss(draws: Draws, config: Config) -> Config:
    return {
        **_heads(draws, config["hidden"]),
        **_experts(draws, "num_local_experts"),
        **_layer_types(draws, config["num_layers"]),
        "head_dim": draws.one_of(8, 20, 64),
        "attention_bias": draws.one_of(True, False),
        "sliding_window": draws.one_of(3, 20),
    }


_FAMILIES: dict[str, Callable[[Draws, Config], Config]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
