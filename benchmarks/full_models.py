"""The paper's three models at full size, as configs: what the GPU benchmarks draw random weights for."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosspool.models.families.registry import spec_from_config
from crosspool.models.spec import ModelSpec

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "num_hidden_layers": 47,
        "first_k_dense_replace": 1,
        "intermediate_size": 10240,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rope_interleave": True,
        "rope_theta": 1000000.0,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}


def full_spec(name: str, num_layers: int | None = None) -> ModelSpec:
    """The model's spec, or that of its last `num_layers` layers (the MoE ones)."""
    spec = spec_from_config(CONFIGS[name])
    return spec if num_layers is None else replace(spec, layers=spec.layers[-num_layers:])


def write_model_dir(directory: Path, name: str, num_layers: int | None = None) -> Path:
    """A model directory without weights (`--weights random`): config, and a tokenizer of words w0, w1, ... by id.

    num_layers: of the model, the first ones; None: all.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name] | ({} if num_layers is None else {"num_hidden_layers": num_layers})
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the models' directories without weights: --weights random.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for model in CONFIGS:
        print(write_model_dir(directory, model))


if __name__ == "__main__":
    main()
