"""Loads what a KV rank needs of a model's checkpoint: its non-FFN weights, of this rank's heads alone where cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from crosspool.backends.base import Progress
from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.kv_rank.head_exchange import cut_heads
from crosspool.backends.cuda.kv_rank.kv_router import Routers
from crosspool.backends.cuda.loading.ffn_weights import pack_router
from crosspool.backends.cuda.loading.random_slices import draw_share
from crosspool.backends.cuda.loading.streaming import stream_share
from crosspool.backends.cuda.loading.weights import AttentionWeights, pack_attention_weights
from crosspool.cluster.base import ModelPlacement
from crosspool.kv_pool.split import share_of_heads
from crosspool.models.directory import ModelDirectory
from crosspool.models.spec import GQASpec, ModelSpec
from crosspool.models.tensors import ROUTER_TENSORS


@dataclass(frozen=True, slots=True)
class LoadedKV:
    """Weights on the device, and the model as this rank runs it. routers: where experts are chosen here."""

    spec: ModelSpec
    weights: AttentionWeights
    num_bytes: int
    routers: Routers | None


def check_placement(placement: ModelPlacement, spec: ModelSpec) -> None:
    """Raises ValueError for a cache dtype that the kernels do not read, or a split that they do not know."""
    if placement.kv_dtype != "bfloat16":
        raise ValueError(
            f"kv_dtype is {placement.kv_dtype} for {placement.name}; the CUDA backend holds bfloat16, set it so"
        )
    has_window = any(isinstance(each.attention, GQASpec) and each.attention.sliding_window for each in spec.layers)
    if placement.kv_split == "tokens" and has_window:
        raise ValueError(
            f"kv_split is tokens for {placement.name}, whose attention has a sliding window; use kv_split one"
        )


def is_share(placement: ModelPlacement, rank: str) -> bool:
    """Whether another KV rank leads the model's steps, and this one takes part in them."""
    return placement.kv_split != "one" and placement.kv_ranks.index(rank) > 0


def load_kv(directory: ModelDirectory, placement: ModelPlacement, site: Site, progress: Progress) -> LoadedKV:
    """Stream the weights from the checkpoint, or draw them where the placement asks for random ones."""
    index, num_ranks = placement.kv_ranks.index(site.rank), len(placement.kv_ranks)
    also = ROUTER_TENSORS if placement.route == "kv" else frozenset[str]()
    if placement.has_random_weights:
        model, layers = draw_share(directory.spec, "kv", site.device, progress, also=also)
    else:
        model, layers = stream_share(directory, "kv", site.device, progress, also=also)
    spec = directory.spec
    if placement.kv_split == "heads":
        spec = share_of_heads(directory.spec, index, num_ranks)
        layers = _cut(directory.spec, layers, index, num_ranks)
    if is_share(placement, site.rank):
        model = {name: tensor[:0] for name, tensor in model.items()}
    weights = pack_attention_weights(spec, model, iter(layers))
    routers = [pack_router(layer) if "router" in layer else None for layer in layers] if also else None
    num_bytes = sum(tensor.nbytes for tensors in (model, *layers) for tensor in tensors.values())
    return LoadedKV(spec, weights, num_bytes, routers)


def _cut(
    spec: ModelSpec, layers: Sequence[Mapping[str, torch.Tensor]], index: int, num_ranks: int
) -> list[dict[str, torch.Tensor]]:
    """The layers with one rank's heads alone."""
    cut = []
    for layer, tensors in zip(spec.layers, layers, strict=True):
        assert isinstance(layer.attention, GQASpec), "latent attention has no KV heads to cut"
        cut.append(cut_heads(tensors, layer.attention, index, num_ranks))
    return cut
