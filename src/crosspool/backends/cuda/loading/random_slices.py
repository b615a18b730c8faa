"""A weights rank's slice of random FFN weights: the same model whatever the number of slices."""

from collections.abc import Collection, Mapping, Sequence

import torch

from crosspool.backends.base import Progress
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights, pack_ffn
from crosspool.backends.cuda.loading.weights import random_layers
from crosspool.models.spec import ModelSpec
from crosspool.models.tensors import Pool, weight_bytes
from crosspool.weights_pool.placement import IntermediateSlice, intermediate_slices
from crosspool.weights_pool.regions import DOUBLED, SLICED_AXIS

SEED = 7
"""Of served random models."""


def random_ffn_slices(
    spec: ModelSpec, seed: int, devices: Sequence[torch.device], shares: Sequence[float] | None = None
) -> list[tuple[FFNLayerWeights, ...]]:
    """Random FFN weights cut over `devices`; drawn on the first, layer by layer, so that little more than the slices
    is ever held.
    """
    sliced: list[list[FFNLayerWeights]] = [[] for _ in devices]
    shares_drawn = random_layers(spec, "weights", seed, devices[0])
    next(shares_drawn)
    for layer, (_, tensors) in zip(spec.layers, shares_drawn, strict=True):
        for idx, device in enumerate(devices):
            own = {name: cut(name, tensor, idx, len(devices), shares).to(device) for name, tensor in tensors.items()}
            sliced[idx].append(pack_ffn(layer.ffn, spec.hidden_size, own))
    return [tuple(layers) for layers in sliced]


def draw_share(
    spec: ModelSpec,
    pool: Pool,
    device: torch.device,
    progress: Progress,
    slice_index: int = 0,
    num_slices: int = 1,
    shares: Sequence[float] | None = None,
    also: Collection[str] = (),
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """(the model's own tensors, those of each layer) of a rank's share, drawn where `stream_share` reads a checkpoint.

    The same model whatever the number of slices, each time. also: as `random_layers` takes it.
    """
    drawn = random_layers(spec, pool, SEED, device, also)
    _, model = next(drawn)
    layers: list[dict[str, torch.Tensor]] = []
    total, done = weight_bytes(spec, pool) // num_slices, sum(tensor.nbytes for tensor in model.values())
    for _, tensors in drawn:
        own = {
            name: cut(name, tensor, slice_index, num_slices, shares) if pool == "weights" else tensor
            for name, tensor in tensors.items()
        }
        layers.append(own)
        if pool == "weights" and num_slices > 1:
            tensors.clear()
            torch.cuda.empty_cache()  # else slices lie in what whole tensors had, with gaps too small for the next one
        done += sum(tensor.nbytes for tensor in own.values())
        progress(min(done, total), total)
    return dict(model), layers


def cut(
    name: str,
    tensor: torch.Tensor,
    slice_index: int,
    num_slices: int,
    shares: Sequence[float] | None = None,
) -> torch.Tensor:
    """A rank's part of one canonical tensor, contiguous."""
    if num_slices == 1:
        return tensor
    if name == "expert_down_bias":
        return tensor if slice_index == 0 else torch.zeros_like(tensor)
    axis = SLICED_AXIS.get(name)
    if axis is None:
        return tensor
    width = tensor.shape[axis] // (2 if name in DOUBLED else 1)
    part = intermediate_slices(width, num_slices, shares)[slice_index]
    if name not in DOUBLED:
        return tensor.narrow(axis, part.start, part.width).contiguous()
    return torch.cat([_narrow(tensor, axis, part, first) for first in (0, width)], dim=axis)


def _narrow(tensor: torch.Tensor, axis: int, part: IntermediateSlice, first: int) -> torch.Tensor:
    return tensor.narrow(axis, first + part.start, part.width)


def num_bytes(layers: Sequence[FFNLayerWeights]) -> int:
    """Device bytes of a slice."""
    return sum(
        value.nbytes
        for layer in layers
        for group in (vars(layer), {} if layer.router is None else vars(layer.router))
        for value in _tensors(group)
    )


def _tensors(group: Mapping[str, object]) -> list[torch.Tensor]:
    return [value for value in group.values() if isinstance(value, torch.Tensor)]
