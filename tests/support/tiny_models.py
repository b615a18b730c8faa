"""Writes tiny random Hugging Face model directories, without torch: config, weights, tokenizer with chat template.

`write_tiny_model(tmp_path / "qwen", "qwen3_moe")` is all that most tests need. Weights are drawn so that logits are far
from ties, routers are decided and no branch of the model is negligible. The same arguments give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from crosspool.models.families.family import Family, Source
from crosspool.models.families.registry import FAMILIES, spec_from_config
from crosspool.models.spec import ModelSpec
from crosspool.models.tensors import TensorSpec, model_tensors
from tests.support.tiny_tokenizer import write_tiny_tokenizer

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

_COMMON = {
    "vocab_size": 512,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_COMMON, **_QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "deepseek_v2": {
        **_COMMON,
        **_MLA,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
    "glm4_moe_lite": {
        **_COMMON,
        **_MLA,
        "q_lora_rank": 48,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "rope_interleave": True,
    },
    "mixtral": {**_COMMON, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {
        **_COMMON,
        "intermediate_size": 48,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "qwen2_moe": {
        **_COMMON,
        **_QWEN_EXPERTS,
        "num_key_value_heads": 4,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
        "qkv_bias": True,
        "use_sliding_window": False,
    },
    "deepseek_v3": {
        **_COMMON,
        **_MLA,
        "q_lora_rank": 48,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4_moe": {
        **_COMMON,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        **_COMMON,
        "intermediate_size": 48,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "llama": {
        **_COMMON,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen3": {**_COMMON, "head_dim": 32, "tie_word_embeddings": True},
}
"""Hub-spelled configs, one a family, with the features that make the family what it is."""


def tiny_config(
    family: str, *, num_layers: int = 3, hidden: int = 64, dtype: str = "float32", **overrides: Any
) -> dict[str, Any]:
    """The config.json of a tiny model. An override of `...` (Ellipsis) removes the field."""
    config = {
        "model_type": family,
        **CONFIGS[family],
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "torch_dtype": dtype,
        **overrides,
    }
    return {name: value for name, value in config.items() if value is not ...}


def write_tiny_model(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    num_layers: int = 3,
    hidden: int = 64,
    dtype: str = "float32",
    tokenizer: bool = True,
    fused: bool = False,
    num_shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """Write one model directory and return its path.

    fused: routed experts as one tensor a layer instead of three files' worth an expert (where the family has both).
    num_shards: more than one writes `model-0000i-of-0000n.safetensors` and their index.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, num_layers=num_layers, hidden=hidden, dtype=dtype, **config_overrides)
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": config.get("eos_token_id"), "do_sample": False})
    spec = spec_from_config(config)
    weights = checkpoint_tensors(FAMILIES[family], spec, random_tensors(spec, seed), fused=fused)
    stored = {name: np.ascontiguousarray(array.astype(DTYPES[dtype])) for name, array in weights.items()}
    write_shards(path, stored, num_shards)
    if tokenizer:
        write_tiny_tokenizer(path, vocab_size=spec.vocab_size)
    return path


def random_tensors(spec: ModelSpec, seed: int) -> dict[TensorSpec, np.ndarray]:
    """Seeded float32 values of every canonical tensor; each depends on its own place only."""
    return {
        tensor: _draw(tensor, np.random.default_rng([seed, number]))
        for number, tensor in enumerate(model_tensors(spec))
    }


def _draw(tensor: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(tensor.shape).astype(np.float32)
    if "norm" in tensor.name:
        return 1.0 + 0.1 * values
    if tensor.name in ("choice_bias", "router_bias", "sinks"):
        return 0.3 * values
    if tensor.name.endswith("bias"):
        return 0.1 * values
    if tensor.name == "embed":
        return values
    gain = 2.0 if tensor.name in ("router", "shared_expert_gate", "head") else 1.0
    return gain * values / np.float32(np.sqrt(tensor.shape[-1]))


def checkpoint_tensors(
    family: Family, spec: ModelSpec, tensors: Mapping[TensorSpec, np.ndarray], *, fused: bool = False
) -> dict[str, np.ndarray]:
    """Canonical tensors under the names and in the layout of the family's checkpoints."""
    present = {f"model.layers.{idx}.{name}" for idx in range(spec.num_layers) for name in _fused_names(family)}
    weights: dict[str, np.ndarray] = {}
    for tensor, value in tensors.items():
        for source in family.sources(tensor, present if fused else ()):
            weights[source.name] = _as_stored(source, value)
    return weights


def _fused_names(family: Family) -> Iterator[str]:
    if family.experts is not None:
        yield from family.experts.fused.values()


def _as_stored(source: Source, value: np.ndarray) -> np.ndarray:
    half = value.shape[1] // 2 if value.ndim > 1 else 0
    match source.region:
        case "expert_gate":
            return value[source.expert, :half]
        case "expert_up":
            return value[source.expert, half:]
        case "expert_down":
            down: np.ndarray = value[source.expert]
            return down
        case "fused_columns":
            if source.target.name.startswith("expert_gate_up"):  # gate and up rows become even and odd ones
                value = np.stack((value[:, :half], value[:, half:]), axis=2).reshape(value.shape)
            transposed: np.ndarray = value if value.ndim == 2 else value.swapaxes(1, 2)
            return transposed
    return value


def write_shards(path: Path, tensors: Mapping[str, np.ndarray], num_shards: int = 1) -> None:
    """Write tensors to one file, or dealt in turn to several with an index."""
    if num_shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::num_shards]}
        save_file(part, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(array.nbytes for array in tensors.values())
    _write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
