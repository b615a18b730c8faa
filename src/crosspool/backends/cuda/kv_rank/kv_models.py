"""What a KV rank holds of its models: weights, frames and buffers of those it leads, shares of others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.chunks.span_attention import SpanGraphs
from crosspool.backends.cuda.kv_frames.frames import KVFrames
from crosspool.backends.cuda.kv_rank.kv_pass import KVRows
from crosspool.backends.cuda.kv_rank.kv_router import Routers
from crosspool.backends.cuda.kv_rank.kv_share import KVShare
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.steps.lane import finish
from crosspool.backends.sequences.page_reader import PageReader
from crosspool.cluster.base import ModelPlacement
from crosspool.kv_pool.geometry import PageGeometry, page_geometry
from crosspool.kv_pool.split import KVSplit, cached_spec
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec
from crosspool.units import ceil_div


@dataclass
class KVModel:
    """One model's non-FFN weights and the row buffers of each (lane, bucket)."""

    spec: ModelSpec
    weights: AttentionWeights
    num_bytes: int
    geometry: PageGeometry
    frames: torch.Tensor  # where the frame numbers of its pages lie
    max_pages: int
    pages: PageReader
    numbers: Mapping[str, int]  # of the KV ranks that hold shares, by name
    own_number: int | None = None  # of this KV rank, where each page lies whole on one of several
    split: KVSplit = "one"
    routers: Routers | None = None
    rows: dict[tuple[int, int], KVRows] = field(default_factory=dict)
    spans: dict[GQASpec | MLASpec, SpanGraphs] = field(default_factory=dict)


class KVModels:
    """The models of one KV rank by name: those it leads, and those of which it has a share."""

    def __init__(self, site: Site, frames: KVFrames, first_frame: int | None, kv_ranks: Sequence[str]) -> None:
        """first_frame: number of this rank's frame 0 where there are several KV ranks, `kv_ranks` in their order."""
        self._site, self._frames, self._first_frame, self._kv_ranks = site, frames, first_frame, tuple(kv_ranks)
        self._led: dict[str, KVModel] = {}
        self._shares: dict[str, KVShare] = {}

    def led(self, name: str) -> KVModel:
        """Raises ValueError for a model that is not here."""
        model = self._led.get(name)
        if model is None:
            raise ValueError(f"model {name!r} is not on this KV rank; it has {sorted(self._led)}")
        return model

    def share(self, name: str) -> KVShare:
        """Raises ValueError for a model of which there is no share here."""
        share = self._shares.get(name)
        if share is None:
            raise ValueError(f"this KV rank has no share of model {name!r}; it has {sorted(self._shares)}")
        return share

    def add_led(
        self,
        placement: ModelPlacement,
        spec: ModelSpec,
        weights: AttentionWeights,
        num_bytes: int,
        routers: Routers | None,
    ) -> None:
        """A model whose steps this rank leads. routers: where experts are chosen here."""
        geometry = self._geometry(placement, spec)
        frames, most = self._memory(placement, spec, geometry)
        split = placement.kv_split
        self._led[placement.name] = KVModel(
            spec,
            weights,
            num_bytes,
            geometry,
            frames,
            most,
            self._pages(placement, geometry.frames_per_page),
            {peer: self._kv_ranks.index(peer) for peer in placement.kv_peers} if split != "one" else {},
            self._kv_ranks.index(self._site.rank) if split == "tokens" else None,
            split,
            routers,
        )

    def add_share(
        self, placement: ModelPlacement, spec: ModelSpec, weights: AttentionWeights | None, num_bytes: int
    ) -> None:
        """A share of a model whose home is another KV rank. weights: of this rank's heads, where cut."""
        geometry = self._geometry(placement, spec)
        frames, most = self._memory(placement, spec, geometry)
        pages = self._pages(placement, geometry.frames_per_page)
        number = self._kv_ranks.index(self._site.rank)
        self._shares[placement.name] = KVShare(
            spec, geometry, frames, most, number, pages, weights=weights, num_bytes=num_bytes
        )

    def remove(self, name: str) -> None:
        """No kernel uses the model any more."""
        if self._led.pop(name, None) is not None or self._shares.pop(name, None) is not None:
            self._frames.remove_model(name)

    def num_weight_bytes(self) -> int:
        """Of all models, shares too."""
        led, shares = tuple(self._led.values()), tuple(self._shares.values())
        return sum(model.num_bytes for model in led) + sum(share.num_bytes for share in shares)

    def consumers(self) -> dict[str, int]:
        """Bytes by what they are for, each model's weights apart."""
        models = {f"attention weights of {name}": model.num_bytes for name, model in tuple(self._led.items())}
        return {"KV cache": self._frames.num_bytes, **models}

    def _geometry(self, placement: ModelPlacement, spec: ModelSpec) -> PageGeometry:
        """Of a page's part here. Where heads do not divide, the first rank's rows are the widest, and every rank's."""
        if placement.kv_split == "heads" and self._site.rank != placement.kv_rank:
            spec = read_model_dir(placement.directory).spec
            spec = cached_spec(spec, "heads", len(placement.kv_ranks))
        return page_geometry(
            spec,
            page_tokens=placement.page_tokens,
            frame_bytes=self._frames.frame_bytes,
            kv_dtype="bfloat16",
            model=placement.name,
        )

    def _memory(self, placement: ModelPlacement, spec: ModelSpec, geometry: PageGeometry) -> tuple[torch.Tensor, int]:
        """The model's frames, and the most pages of one sequence on this rank."""
        frames = self._frames.add_model(placement.name, geometry.frames_per_page)
        finish(self._site.device)
        context = ceil_div(spec.max_position_embeddings, placement.page_tokens)
        return frames, max(1, min(context, len(frames) // geometry.frames_per_page))

    def _pages(self, placement: ModelPlacement, frames_per_page: int) -> PageReader:
        """How frame numbers of the deployment are read here."""
        if self._first_frame is None:
            return PageReader(model=placement.name, frames_per_page=frames_per_page)
        is_cut = placement.kv_split == "heads"
        return PageReader(
            model=placement.name,
            frames_per_page=frames_per_page,
            first_frame=self._first_frame,
            num_frames=self._frames.num_bytes // self._frames.frame_bytes,
            part=placement.kv_ranks.index(self._site.rank) if is_cut else 0,
            num_parts=len(placement.kv_ranks) if is_cut else 1,
            is_spread=placement.kv_split == "tokens",
        )
