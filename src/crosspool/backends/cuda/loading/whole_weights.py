"""A whole model's weights as its kernels read them, and the same in other memory, tensor by tensor."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from crosspool.backends.cuda.loading.attention_weights import AttentionLayerWeights
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WholeLayer:
    """Both halves of one layer. router: as `chunk_routers` makes it; None: a dense layer."""

    attention: AttentionLayerWeights
    ffn: FFNLayerWeights
    router: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class WholeWeights:
    """What a prefill rank needs of a model: all but the head, which its home has."""

    embed: torch.Tensor
    final_norm: torch.Tensor
    layers: tuple[WholeLayer, ...]


def mapped(weights: T, other: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """The same dataclass of weights with `other` of each of its tensors, those of its dataclasses included."""
    changed: dict[str, Any] = {}
    assert is_dataclass(weights)
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, torch.Tensor):
            changed[field.name] = other(value)
        elif is_dataclass(value) and any(_holds_tensors(getattr(value, each.name)) for each in fields(value)):
            changed[field.name] = mapped(value, other)
    return replace(weights, **changed)  # type: ignore[type-var]


def _holds_tensors(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return is_dataclass(value) and any(_holds_tensors(getattr(value, field.name)) for field in fields(value))
