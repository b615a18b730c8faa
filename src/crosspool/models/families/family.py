"""What a family is: a rule from config to spec, and the names its checkpoints give to canonical tensors.

The names at the end are those that most families share, after `model.layers.{layer}.`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from crosspool.models.config_json import HFConfig
from crosspool.models.spec import ModelSpec
from crosspool.models.tensors import TensorSpec

Region = Literal["whole", "expert_gate", "expert_up", "expert_down", "fused", "fused_columns"]
"""Which part of its canonical tensor a checkpoint tensor fills, and how it lies there.

whole: all of it, same shape. expert_gate, expert_up, expert_down: one expert's matrix.
fused: all experts, same shape as the canonical one (gate rows, then up rows).
fused_columns (gpt-oss): all experts, matrices transposed, gate in the even and up in the odd columns.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint tensor and what it is: `shape` as stored, at full (unsliced) width."""

    name: str
    shape: tuple[int, ...]
    target: TensorSpec
    region: Region = "whole"
    expert: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """Names of the routed experts' tensors after the layer's prefix; `{expert}` stands for the expert's index.

    gate, up, down: one matrix an expert ("" where the family has no such files). fused: canonical name to file name.
    """

    gate: str = ""
    up: str = ""
    down: str = ""
    fused: Mapping[str, str] = field(default_factory=dict)
    fused_region: Literal["fused", "fused_columns"] = "fused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model type. `layer_names`: canonical name to the accepted names after `model.layers.{layer}.`."""

    model_type: str
    read_spec: Callable[[HFConfig], ModelSpec]
    layer_names: Mapping[str, tuple[str, ...]]
    experts: ExpertNames | None = None
    model_names: Mapping[str, str] = field(
        default_factory=lambda: {
            "embed": "model.embed_tokens.weight",
            "final_norm": "model.norm.weight",
            "head": "lm_head.weight",
        }
    )

    def sources(self, tensor: TensorSpec, present: Collection[str]) -> Iterator[Source]:
        """The checkpoint tensors that make up `tensor`, given the names `present` in the checkpoint.

        Where several names or layouts are accepted, the first whose (first) tensor is present is taken; if none is,
        the first, so that the caller can name what is missing.
        """
        if tensor.layer is None:
            yield Source(self.model_names[tensor.name], tensor.shape, tensor)
            return
        prefix = f"model.layers.{tensor.layer}."
        if self.experts is None or not tensor.name.startswith("expert_"):
            names = [prefix + name for name in self.layer_names[tensor.name]]
            yield Source(next((name for name in names if name in present), names[0]), tensor.shape, tensor)
            return
        fused = self.experts.fused.get(tensor.name, "")
        if not self.experts.gate or (fused and prefix + fused in present):
            yield _fused_source(prefix + fused, tensor, self.experts.fused_region)
        else:
            yield from _expert_sources(prefix, tensor, self.experts)


def _fused_source(name: str, tensor: TensorSpec, region: Literal["fused", "fused_columns"]) -> Source:
    shape = tensor.shape
    if region == "fused_columns" and len(shape) == 3:
        shape = (shape[0], shape[2], shape[1])
    return Source(name, shape, tensor, region)


def _expert_sources(prefix: str, tensor: TensorSpec, names: ExpertNames) -> Iterator[Source]:
    num_experts, rows, columns = tensor.shape
    for expert in range(num_experts):
        if tensor.name == "expert_down":
            yield Source(prefix + names.down.format(expert=expert), (rows, columns), tensor, "expert_down", expert)
            continue
        for name, region in ((names.gate, "expert_gate"), (names.up, "expert_up")):
            shape = (rows // 2, columns)
            yield Source(prefix + name.format(expert=expert), shape, tensor, region, expert)  # type: ignore[arg-type]


NORM_NAMES = {
    "input_norm": ("input_layernorm.weight",),
    "post_attention_norm": ("post_attention_layernorm.weight",),
}

GQA_NAMES = {
    "q": ("self_attn.q_proj.weight",),
    "k": ("self_attn.k_proj.weight",),
    "v": ("self_attn.v_proj.weight",),
    "o": ("self_attn.o_proj.weight",),
    "q_bias": ("self_attn.q_proj.bias",),
    "k_bias": ("self_attn.k_proj.bias",),
    "v_bias": ("self_attn.v_proj.bias",),
    "o_bias": ("self_attn.o_proj.bias",),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "sinks": ("self_attn.sinks",),
}

MLA_NAMES = {
    "q": ("self_attn.q_proj.weight",),
    "q_a": ("self_attn.q_a_proj.weight",),
    "q_a_bias": ("self_attn.q_a_proj.bias",),
    "q_a_norm": ("self_attn.q_a_layernorm.weight",),
    "q_b": ("self_attn.q_b_proj.weight",),
    "kv_a": ("self_attn.kv_a_proj_with_mqa.weight",),
    "kv_a_bias": ("self_attn.kv_a_proj_with_mqa.bias",),
    "kv_a_norm": ("self_attn.kv_a_layernorm.weight",),
    "kv_b": ("self_attn.kv_b_proj.weight",),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
}

DENSE_NAMES = {
    "gate": ("mlp.gate_proj.weight",),
    "up": ("mlp.up_proj.weight",),
    "down": ("mlp.down_proj.weight",),
}

MOE_NAMES = {
    "router": ("mlp.gate.weight",),
    "choice_bias": ("mlp.gate.e_score_correction_bias",),
    "shared_gate": ("mlp.shared_experts.gate_proj.weight",),
    "shared_up": ("mlp.shared_experts.up_proj.weight",),
    "shared_down": ("mlp.shared_experts.down_proj.weight",),
}

EXPERT_NAMES = ExpertNames(
    gate="mlp.experts.{expert}.gate_proj.weight",
    up="mlp.experts.{expert}.up_proj.weight",
    down="mlp.experts.{expert}.down_proj.weight",
    fused={"expert_gate_up": "mlp.experts.gate_up_proj", "expert_down": "mlp.experts.down_proj"},
)
