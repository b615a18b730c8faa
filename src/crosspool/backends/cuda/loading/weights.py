"""A model's weights on the device: from canonical tensors, wherever these come from."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from crosspool.backends.cuda.loading.attention_weights import AttentionLayerWeights, pack_attention
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights, pack_ffn
from crosspool.models.spec import ModelSpec
from crosspool.models.tensors import FLOAT32_TENSORS, Pool, TensorSpec, model_tensors

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """The KV pool's share of a model."""

    embed: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor
    layers: tuple[AttentionLayerWeights, ...]


def pack_attention_weights(spec: ModelSpec, model: Tensors, layers: Iterator[Tensors]) -> AttentionWeights:
    """Canonical tensors, layer after layer, as the kernels' weights."""
    return AttentionWeights(
        embed=model["embed"],
        final_norm=model["final_norm"],
        head=model["embed"] if spec.tie_word_embeddings else model["head"],
        layers=tuple(
            pack_attention(layer.attention, tensors) for layer, tensors in zip(spec.layers, layers, strict=True)
        ),
    )


def pack_ffn_weights(spec: ModelSpec, layers: Iterator[Tensors]) -> tuple[FFNLayerWeights, ...]:
    return tuple(
        pack_ffn(layer.ffn, spec.hidden_size, tensors) for layer, tensors in zip(spec.layers, layers, strict=True)
    )


def random_layers(
    spec: ModelSpec, pool: Pool, seed: int, device: torch.device, also: Collection[str] = ()
) -> Iterator[tuple[int | None, dict[str, torch.Tensor]]]:
    """(layer, canonical tensors) of one pool, drawn on the device at true shapes; the model's own under None, first.

    also: names of the other pool's tensors that come with them.
    Every tensor has its own seed, so a share is the same whatever else is drawn. Embeddings have unit variance and
    norms are one, so that attention's average does not drown the token; the router keeps the logits of normed rows
    near unit variance, so that routing is near uniform; o and down are scaled so that all layers together add an
    eighth of the embedding's variance, which keeps a random model's rounding errors from growing layer by layer.
    """
    groups: dict[int | None, dict[str, TensorSpec]] = {None: {}}
    seeds: dict[TensorSpec, int] = {}
    for number, tensor in enumerate(model_tensors(spec)):
        if tensor.pool == pool or tensor.name in also:
            groups.setdefault(tensor.layer, {})[tensor.name] = tensor
            seeds[tensor] = seed * 1_000_003 + number
    for layer, members in groups.items():
        yield layer, {name: _draw(tensor, seeds[tensor], spec, device) for name, tensor in members.items()}


def random_attention_weights(spec: ModelSpec, seed: int, device: torch.device) -> AttentionWeights:
    shares = random_layers(spec, "kv", seed, device)
    _, model = next(shares)
    return pack_attention_weights(spec, model, (tensors for _, tensors in shares))


def random_ffn_weights(spec: ModelSpec, seed: int, device: torch.device) -> tuple[FFNLayerWeights, ...]:
    shares = random_layers(spec, "weights", seed, device)
    next(shares)
    return pack_ffn_weights(spec, (tensors for _, tensors in shares))


def _draw(tensor: TensorSpec, seed: int, spec: ModelSpec, device: torch.device) -> torch.Tensor:
    dtype = torch.float32 if tensor.name in FLOAT32_TENSORS else torch.bfloat16
    values = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
    if "norm" in tensor.name:
        return values.fill_(1.0).to(dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    values.normal_(0.0, random_std(tensor, spec), generator=generator)
    return values.to(dtype)


def random_std(tensor: TensorSpec, spec: ModelSpec) -> float:
    """Of random values that stand for a tensor of either pool: see `random_layers`. Norms are one instead."""
    if tensor.name == "embed":
        return 1.0
    if tensor.name.endswith("bias") or tensor.name == "sinks":
        return 0.02
    std = float(tensor.shape[-1]) ** -0.5
    if tensor.name in ("o", "down", "expert_down", "shared_down"):
        std *= (16 * spec.num_layers) ** -0.5
    return std


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
