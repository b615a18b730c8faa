"""placed_model: what one KV rank holds of a model, by its placement: the home's part, or a share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from crosspool.backends.base import FloatArray, LaneLinks, Progress
from crosspool.backends.numpy.attention_half import AttentionHalf
from crosspool.backends.numpy.attention_step import AttentionStep, Exchange, Model
from crosspool.backends.numpy.kv_cache import Arena
from crosspool.backends.numpy.layer_router import KVRouters
from crosspool.backends.numpy.matrices import each_released
from crosspool.backends.numpy.split_heads import HeadExchange, HeadShare, cut_heads
from crosspool.backends.numpy.split_tokens import TokenExchange, TokenShare
from crosspool.backends.sequences.page_reader import PageReader
from crosspool.cluster.base import ModelPlacement
from crosspool.kv_pool.geometry import PageGeometry, page_geometry
from crosspool.kv_pool.split import cached_spec, share_of_heads
from crosspool.models.directory import ModelDirectory, read_model_dir
from crosspool.models.spec import GQASpec, ModelSpec
from crosspool.models.tensors import ROUTER_TENSORS
from crosspool.weights_pool.loader import ModelWeights, load_attention_weights


@dataclass(frozen=True, slots=True)
class Site:
    """Where a KV rank stands: its name among all KV ranks of the deployment, and its arena."""

    rank: str
    kv_ranks: tuple[str, ...]
    arena: Arena

    @property
    def numbers(self) -> dict[str, int]:
        """Every KV rank's number, as frame numbers tell it."""
        return {name: number for number, name in enumerate(self.kv_ranks)}

    def pages(self, model: str, frames_per_page: int, part: int = 0, num_parts: int = 1) -> PageReader:
        """How this rank reads pages that have a part on each of `num_parts` ranks, or lie on this one."""
        return PageReader(
            model=model,
            frames_per_page=frames_per_page,
            first_frame=self.numbers[self.rank] * len(self.arena),
            num_frames=len(self.arena) if len(self.kv_ranks) > 1 else None,
            part=part,
            num_parts=num_parts,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """A model's share on a KV rank that is not its home."""

    part: TokenShare | HeadShare
    page_tokens: int
    pages: PageReader


def placed_model(placement: ModelPlacement, site: Site, progress: Progress) -> Model | Share:
    """Load this rank's part of the model. Raises what reading its directory and weights raises."""
    directory = read_model_dir(placement.directory)
    split, num_ranks = placement.kv_split, len(placement.kv_ranks)
    geometry = page_geometry(
        cached_spec(directory.spec, split, num_ranks),
        page_tokens=placement.page_tokens,
        frame_bytes=placement.frame_bytes,
        kv_dtype="float32",
        model=placement.name,
    )
    index = placement.kv_ranks.index(site.rank)
    if split == "tokens":
        return _spread(placement, site, geometry, index, progress)
    if split == "heads":
        return _cut(placement, site, geometry, index, progress)
    weights = _home_weights(placement, directory, progress)
    routers = _routers(placement, directory.spec, weights)
    half = _half(directory.spec, weights, site.arena, geometry)
    pages = site.pages(placement.name, geometry.frames_per_page)
    return Model(half, placement.page_tokens, pages, routers=routers)


def _spread(
    placement: ModelPlacement, site: Site, geometry: PageGeometry, index: int, progress: Progress
) -> Model | Share:
    """Split `tokens`: every page on one rank, all weights on the home."""
    directory = read_model_dir(placement.directory)
    pages = replace(site.pages(placement.name, geometry.frames_per_page), is_spread=True)
    if index > 0:
        part = TokenShare(directory.spec, site.arena, geometry, site.numbers[site.rank])
        return Share(part, placement.page_tokens, pages)

    def exchange(step: AttentionStep, links: LaneLinks) -> Exchange:
        return TokenExchange(step, links, placement.page_tokens, site.numbers, site.rank)

    weights = _home_weights(placement, directory, progress)
    routers = _routers(placement, directory.spec, weights)
    half = _half(directory.spec, weights, site.arena, geometry)
    return Model(half, placement.page_tokens, pages, exchange, routers)


def _cut(
    placement: ModelPlacement, site: Site, geometry: PageGeometry, index: int, progress: Progress
) -> Model | Share:
    """Split `heads`: every page and every layer's attention in parts, all else on the home."""
    directory = read_model_dir(placement.directory)
    num_ranks = len(placement.kv_ranks)
    spec = share_of_heads(directory.spec, index, num_ranks)
    pages = site.pages(placement.name, geometry.frames_per_page, index, num_ranks)
    if index > 0:
        weights = load_attention_weights(directory, np.float32, progress, is_share=True)
    else:
        weights = _home_weights(placement, directory, progress)
    routers = None if index > 0 else _routers(placement, directory.spec, weights)
    layers = _cut_layers(directory.spec, weights, index, num_ranks)
    if index > 0:
        return Share(HeadShare(spec, layers, site.arena, geometry), placement.page_tokens, pages)
    half = AttentionHalf(spec, weights.model, layers, site.arena, geometry)
    return Model(half, placement.page_tokens, pages, HeadExchange, routers)


def _home_weights(placement: ModelPlacement, directory: ModelDirectory, progress: Progress) -> ModelWeights:
    """All of the KV pool's share, with the routers where experts are chosen here."""
    also = ROUTER_TENSORS if placement.route == "kv" else frozenset[str]()
    return load_attention_weights(directory, np.float32, progress, also=also)


def _routers(placement: ModelPlacement, spec: ModelSpec, weights: ModelWeights) -> KVRouters | None:
    return KVRouters(spec, weights.layers) if placement.route == "kv" else None


def _half(spec: ModelSpec, weights: ModelWeights, arena: Arena, geometry: PageGeometry) -> AttentionHalf:
    return AttentionHalf(spec, weights.model, each_released(weights.layers), arena, geometry)


def _cut_layers(spec: ModelSpec, weights: ModelWeights, index: int, num_ranks: int) -> Iterator[dict[str, FloatArray]]:
    """The layers one by one with this rank's heads; each is let go of once it has been cut."""
    for layer, whole in zip(spec.layers, each_released(weights.layers), strict=True):
        assert isinstance(layer.attention, GQASpec)
        yield cut_heads(whole, layer.attention, index, num_ranks)
