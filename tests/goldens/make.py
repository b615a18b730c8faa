"""Makes the goldens: `python -m tests.goldens.make` with torch and transformers installed.

For every family a tiny checkpoint (bfloat16, saved by transformers in its own layout) and what transformers computes
from it in float32: each layer's output, the logits, and greedy tokens. The default tests compare with these files, so
that they need no torch. Making them again is only right when a family, its config or transformers changed on purpose.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.support.judge_models import greedy_tokens, judge_model, layer_outputs
from tests.support.tiny_models import CONFIGS

FOLDER = Path(__file__).parent
NUM_GREEDY = 32
SMALL = {
    "num_layers": 2,
    "hidden": 32,
    "vocab_size": 64,
    "intermediate_size": 32,
    "dtype": "bfloat16",
}
GQA = {"head_dim": 8}
MLA = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "moe_intermediate_size": 16,
}
EXPERTS = {"moe_intermediate_size": 16}
OPTIONS = {
    "qwen3_moe": GQA | EXPERTS,
    "deepseek_v2": MLA | {"q_lora_rank": None},
    "glm4_moe_lite": MLA,
    "mixtral": {"intermediate_size": 16},
    "olmoe": {"intermediate_size": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "deepseek_v3": MLA,
    "glm4_moe": GQA | EXPERTS,
    "gpt_oss": GQA | {"intermediate_size": 16},
    "llama": {},
    "qwen3": GQA,
}


def make(family: str) -> None:
    path = FOLDER / family
    shutil.rmtree(path, ignore_errors=True)
    judge = judge_model(path, family, seed=1, **(SMALL | OPTIONS[family]))
    judge.to(torch.bfloat16).save_pretrained(path)
    (path / "model.safetensors").chmod(0o644)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = np.random.default_rng(3).integers(1, 64, 14).tolist()
    layers, logits = layer_outputs(model, prompt)
    np.savez_compressed(
        path / "golden.npz",
        prompt=np.array(prompt),
        layers=np.stack(layers),
        logits=logits,
        greedy=np.array(greedy_tokens(model, prompt, NUM_GREEDY)),
    )


def main(families: list[str]) -> None:
    for family in families or CONFIGS:
        make(family)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (FOLDER / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
