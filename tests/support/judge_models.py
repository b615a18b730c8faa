"""Tiny random checkpoints made by transformers, with decided routers and logits far from flat; torch is needed here."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_models import tiny_config

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe dense layers between": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "qwen3_moe not renormalised": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "deepseek_v2 groups": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
    ),
    "deepseek_v2 q_lora": ("deepseek_v2", {"q_lora_rank": 24, "rope_scaling": None}),
    "deepseek_v3 plain": ("deepseek_v3", {"rope_scaling": None, "n_group": 1, "topk_group": 1, "q_lora_rank": None}),
    "mixtral window": ("mixtral", {"sliding_window": 6}),
    "glm4_moe no qk norm": ("glm4_moe", {"use_qk_norm": False, "partial_rotary_factor": 1.0}),
    "olmoe renormalised": ("olmoe", {"norm_topk_prob": True}),
    "qwen3 windows in late layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": False},
    ),
    "llama linear rope, biases": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3_moe yarn": (
        "qwen3_moe",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
}
"""Options that the families' usual checkpoints do not use."""


def judge_model(path: Path, family: str, *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A model of transformers with seeded weights, saved to `path` in its own layout."""
    path.mkdir(parents=True)
    values = tiny_config(family, **config)
    values.pop("model_type")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **values), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rng = np.random.default_rng(seed)
    embedding_scale = 0.2 if model.config.tie_word_embeddings else 1.0  # tied and large, it repeats the last token
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if tensor.is_floating_point():
                tensor.copy_(torch.from_numpy(_draw(name, tuple(tensor.shape), rng, embedding_scale)))
    model.save_pretrained(path)
    return model


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator, embedding_scale: float) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * values
    if name.endswith("e_score_correction_bias") or "sinks" in name:
        return 0.3 * values
    if "bias" in name:
        return 0.1 * values
    if "embed_tokens" in name:
        return values * np.float32(embedding_scale)
    gain = 2.0 if "gate.weight" in name or "router" in name or "lm_head" in name else 1.0
    return gain * values / np.float32(np.sqrt(shape[-1]))


def layer_outputs(model: PreTrainedModel, token_ids: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """Every layer's output, each (tokens, hidden), and the logits (tokens, vocabulary)."""
    outputs: list[np.ndarray] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden[0].numpy().copy())

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return outputs, logits


def greedy_tokens(model: PreTrainedModel, token_ids: list[int], count: int) -> list[int]:
    """What `generate` answers, end tokens not heeded."""
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        answer = model.generate(torch.tensor([token_ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return answer[0, len(token_ids) :].tolist()
