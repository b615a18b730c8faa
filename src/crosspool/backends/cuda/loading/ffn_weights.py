"""One layer's FFN weights as the kernels read them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from crosspool.models.spec import DenseFFNSpec, MoEFFNSpec


@dataclass(frozen=True, kw_only=True)
class RouterWeights:
    """weight: (experts, hidden) fp32; one more row where a shared expert is gated."""

    weight: torch.Tensor
    logit_bias: torch.Tensor | None
    choice_bias: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class FFNLayerWeights:
    """A slice of one layer's FFN: `width` and `shared_width` are the slice's. A dense layer is a shared expert."""

    spec: DenseFFNSpec | MoEFFNSpec
    hidden: int
    router: RouterWeights | None
    gate_up: torch.Tensor | None  # (experts, 2 * width, hidden)
    down: torch.Tensor | None  # (experts, hidden, width)
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    shared_gate: torch.Tensor | None  # (shared_width, hidden)
    shared_up: torch.Tensor | None
    shared_down: torch.Tensor | None  # (hidden, shared_width)

    @property
    def width(self) -> int:
        return 0 if self.down is None else self.down.shape[2]

    @property
    def shared_width(self) -> int:
        return 0 if self.shared_down is None else self.shared_down.shape[1]

    @property
    def has_shared_gate(self) -> bool:
        return has_shared_gate(self.spec)


def has_shared_gate(spec: DenseFFNSpec | MoEFFNSpec) -> bool:
    """Whether the router has one more row: the shared expert's."""
    return isinstance(spec, MoEFFNSpec) and spec.shared is not None and spec.shared.gated


def pack_router(tensors: Mapping[str, torch.Tensor]) -> RouterWeights:
    """A layer's router, from its canonical tensors (fp32), wherever it runs."""
    weight = tensors["router"].float()
    if "shared_expert_gate" in tensors:
        weight = torch.cat([weight, tensors["shared_expert_gate"].float()])
    return RouterWeights(
        weight=weight.contiguous(),
        logit_bias=tensors.get("router_bias"),
        choice_bias=tensors.get("choice_bias"),
    )


def pack_ffn(spec: DenseFFNSpec | MoEFFNSpec, hidden: int, tensors: Mapping[str, torch.Tensor]) -> FFNLayerWeights:
    """Canonical tensors of one layer (bf16, router tensors fp32, on the device) as the kernels' weights; no copies
    except of the router where a shared gate joins it.
    """
    if isinstance(spec, DenseFFNSpec):
        return FFNLayerWeights(
            spec=spec,
            hidden=hidden,
            router=None,
            gate_up=None,
            down=None,
            gate_up_bias=None,
            down_bias=None,
            shared_gate=tensors["gate"],
            shared_up=tensors["up"],
            shared_down=tensors["down"],
        )
    return FFNLayerWeights(
        spec=spec,
        hidden=hidden,
        router=pack_router(tensors),
        gate_up=tensors["expert_gate_up"],
        down=tensors["expert_down"],
        gate_up_bias=tensors.get("expert_gate_up_bias"),
        down_bias=tensors.get("expert_down_bias"),
        shared_gate=tensors.get("shared_gate"),
        shared_up=tensors.get("shared_up"),
        shared_down=tensors.get("shared_down"),
    )
