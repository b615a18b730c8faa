"""The loader against transformers: same directory, same values, in the layouts transformers itself writes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from crosspool.models.directory import read_model_dir
from crosspool.models.families.registry import FAMILIES
from crosspool.models.tensors import FLOAT32_TENSORS
from crosspool.weights_pool.loader import load_attention_weights, load_ffn_weights
from tests.support.tiny_models import tiny_config

pytestmark = pytest.mark.judge

# transformers' own state dict: experts fused, in the module's own names.
STATE_NAMES = {
    "expert_gate_up": "mlp.experts.gate_up_proj",
    "expert_down": "mlp.experts.down_proj",
    "expert_gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "expert_down_bias": "mlp.experts.down_proj_bias",
}


def build(family: str, dtype: str, **overrides):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(**json.loads(json.dumps(tiny_config(family, **overrides))))
    model = AutoModelForCausalLM.from_config(config)
    for parameter in [*model.parameters(), *(b for name, b in model.named_buffers() if "bias" in name)]:
        parameter.data.normal_()
    return model.to(getattr(torch, dtype))


def expected_in_state(state: dict, family: str, layer: int, name: str) -> np.ndarray:
    accepted = (STATE_NAMES[name],) if name in STATE_NAMES else FAMILIES[family].layer_names[name]
    found = [
        state[f"model.layers.{layer}.{suffix}"] for suffix in accepted if f"model.layers.{layer}.{suffix}" in state
    ]
    value = found[0].float().numpy()
    if family == "gpt_oss" and name.startswith("expert_"):
        value = value if value.ndim == 2 else value.swapaxes(1, 2)
        if "gate_up" in name:
            value = np.concatenate((value[:, 0::2], value[:, 1::2]), axis=1)
    return value


@pytest.mark.parametrize("layout", ["as saved", "state dict"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_tensor_equals_transformers(tmp_path, family, layout):
    """As saved: per expert, in shards. State dict: the fused names, as transformers also reads them back."""
    from safetensors.torch import save_file

    dtype = "bfloat16" if layout == "as saved" else "float32"
    model = build(family, dtype)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if layout == "state dict":
        for file in tmp_path.glob("*.safetensors*"):
            file.unlink()
        save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    else:
        assert (tmp_path / "model.safetensors.index.json").exists()
    directory = read_model_dir(tmp_path)
    assert directory.spec.dtype == dtype
    attention, ffn = load_attention_weights(directory), load_ffn_weights(directory, 0, 1)
    for name, key in FAMILIES[family].model_names.items():
        if name == "head" and directory.spec.tie_word_embeddings:
            continue
        np.testing.assert_array_equal(attention.model[name], state[key].float().numpy())
    for layer in range(directory.spec.num_layers):
        tensors = attention.layers[layer] | ffn.layers[layer]
        for name, value in tensors.items():
            np.testing.assert_array_equal(value, expected_in_state(state, family, layer, name), err_msg=name)
    # Nothing of transformers' model is left out: as many values on both sides.
    ours = sum(
        value.size for part in (attention, ffn) for group in (part.model, *part.layers) for value in group.values()
    )
    tied = state["lm_head.weight"].numel() if directory.spec.tie_word_embeddings else 0
    assert ours == sum(tensor.numel() for tensor in state.values()) - tied


def test_router_tensors_stay_float32_whatever_is_asked_for(tmp_path):
    model = build("glm4_moe_lite", "float32")
    model.save_pretrained(tmp_path)
    weights = load_ffn_weights(read_model_dir(tmp_path), 0, 1, dtype=np.float16)
    for name, value in weights.layers[1].items():
        assert value.dtype == (np.float32 if name in FLOAT32_TENSORS else np.float16)
    np.testing.assert_array_equal(weights.layers[1]["router"], model.state_dict()["model.layers.1.mlp.gate.weight"])
