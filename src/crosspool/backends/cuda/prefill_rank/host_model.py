"""A whole model in pinned host memory, layer after layer, as a prefill rank keeps it beside those in place."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from crosspool.backends.base import Progress
from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.device.driver import CudaError
from crosspool.backends.cuda.kernels.products import exact_parts
from crosspool.backends.cuda.loading.ffn_weights import pack_ffn
from crosspool.backends.cuda.loading.random_slices import SEED, draw_share
from crosspool.backends.cuda.loading.share import Tensors
from crosspool.backends.cuda.loading.streaming import stream_share
from crosspool.backends.cuda.loading.weights import (
    AttentionWeights,
    WholeLayer,
    WholeWeights,
    mapped,
    pack_attention_weights,
    random_layers,
)
from crosspool.backends.cuda.prefill_rank.host_blob import HostBlob
from crosspool.cluster.base import ModelPlacement
from crosspool.models.directory import ModelDirectory
from crosspool.models.spec import ModelSpec
from crosspool.models.tensors import weight_bytes
from crosspool.models.whole_size import whole_groups
from crosspool.units import GiB

CPU = torch.device("cpu")
OWN = None
"""The group of the model's own tensors; a layer's has its number."""


@dataclass(frozen=True)
class HostModel:
    """Weights in `blob`. The same byte of a place holds the same byte of the blob."""

    spec: ModelSpec
    blob: HostBlob
    weights: WholeWeights

    @property
    def num_bytes(self) -> int:
        return self.blob.num_bytes


def load_whole(directory: ModelDirectory, placement: ModelPlacement, site: Site, progress: Progress) -> HostModel:
    """From the checkpoint, or drawn on the device where the placement asks for random weights, as the pools draw them.

    Raises what loading raises; then nothing stays pinned.
    """
    spec, total = directory.spec, weight_bytes(directory.spec)
    own = weight_bytes(spec, "kv")

    def told(done: int, _: int) -> None:
        progress(min(done, total), total)

    attention = _attention(directory, placement, site, told)
    sizes: dict[Hashable, int] = dict(whole_groups(spec).items())
    try:
        blob = HostBlob(site, sizes)
    except (OSError, CudaError) as failure:
        raise ValueError(
            f"{site.rank}: the host has no room to pin {sum(sizes.values()) / GiB:.1f} GiB for {placement.name} "
            f"({failure}); free host memory, serve fewer models, or prefill inline"
        ) from None

    def keep(group: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        if blob.offset(tensor) is not None:
            return tensor
        held = blob.put(group, tuple(tensor.shape), tensor.dtype)
        held.copy_(tensor)
        return held

    def told_ffn(done: int, _: int) -> None:
        progress(min(own + done, total), total)

    try:
        layers = []
        for number, tensors in enumerate(_ffn(directory, placement, site, blob, told_ffn)):
            ffn = mapped(pack_ffn(spec.layers[number].ffn, spec.hidden_size, tensors), partial(keep, number))
            router = None if ffn.router is None else keep(number, exact_parts(ffn.router.weight))
            own_half = attention.layers[number]
            own_half = replace(own_half, input_norm=keep(OWN, own_half.input_norm))  # the layer before needs it
            layers.append(WholeLayer(attention=mapped(own_half, partial(keep, number)), ffn=ffn, router=router))
        embed, final_norm = (keep(OWN, tensor) for tensor in (attention.embed, attention.final_norm))
        progress(total, total)
    except BaseException:
        blob.close()
        raise
    return HostModel(spec, blob, WholeWeights(embed=embed, final_norm=final_norm, layers=tuple(layers)))


def _attention(
    directory: ModelDirectory, placement: ModelPlacement, site: Site, progress: Progress
) -> AttentionWeights:
    if placement.has_random_weights:
        model, layers = draw_share(directory.spec, "kv", site.device, progress)
    else:
        model, layers = stream_share(directory, "kv", CPU, progress)
    return pack_attention_weights(directory.spec, model, iter(layers))


def _ffn(
    directory: ModelDirectory, placement: ModelPlacement, site: Site, blob: HostBlob, progress: Progress
) -> Iterator[Tensors]:
    """Canonical FFN tensors of each layer: of a checkpoint in the blob already; drawn ones on the device."""
    if not placement.has_random_weights:

        def room(layer: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return blob.put(layer, shape, dtype)

        _, layers = stream_share(directory, "weights", CPU, progress, room=room)
        yield from layers
        return
    drawn, done = random_layers(directory.spec, "weights", SEED, site.device), 0
    next(drawn)
    for _, tensors in drawn:
        yield dict(tensors)
        done += sum(tensor.nbytes for tensor in tensors.values())
        progress(done, done)
