"""What a family is: a rule from config to spec, and the names its checkpoints give to canonical tensors."""

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
