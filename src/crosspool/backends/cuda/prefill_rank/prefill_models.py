"""What a prefill rank keeps of its models, and where they are in place."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.chunks.chunk_warm_up import capture_spans, warm_up_attention, warm_up_ffn
from crosspool.backends.cuda.chunks.span_attention import SpanGraphs
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.loading.weights import AttentionWeights, WholeWeights, mapped
from crosspool.backends.cuda.prefill_rank.host_model import HostModel
from crosspool.backends.cuda.prefill_rank.places import Place, Places
from crosspool.backends.cuda.prefill_rank.swap import InPlace, Swapper
from crosspool.backends.cuda.steps.lane import WorkerLane, finish
from crosspool.backends.cuda.steps.lanes import WorkerLanes
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefillModel:
    """host: its weights; geometry: of a page of one layer, which the cache of a chunk holds at a time."""

    host: HostModel
    geometry: PageGeometry
    spans: dict[GQASpec | MLASpec, SpanGraphs] = field(default_factory=dict)


class ModelsInTurn:
    """The models of one rank, in host memory, and those that are in place on its device."""

    def __init__(self, site: Site, room_bytes: int) -> None:
        self._swapper = Swapper(site.device)

        def make(num_bytes: int) -> torch.Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8, device=site.device)

        self.places = Places(site.rank, room_bytes, make, self._swapper.settle)
        self._rank = site.rank
        self._models: dict[str, PrefillModel] = {}
        self._given_up: list[tuple[Place, WorkerLane, object]] = []
        self._lock = threading.Lock()  # a place and what is brought there change together, whatever thread asks

    def __getitem__(self, name: str) -> PrefillModel:
        """Raises ValueError for a model that is not here."""
        model = self._models.get(name)
        if model is None:
            raise ValueError(f"model {name!r} is not on rank {self._rank}; it has {sorted(self._models)}")
        return model

    def make_room(self, name: str, num_bytes: int) -> bool:
        """`Places.make_room`, never between the choice of a place and the copies to it."""
        self.settle()
        with self._lock:
            return self.places.make_room(name, num_bytes)

    def add(self, name: str, model: PrefillModel) -> None:
        """Take a model that has been loaded; it comes to a place that no other model has, if there is one."""
        self._models[name] = model
        self._bring(name, model, may_replace=False)

    def remove(self, name: str) -> None:
        """No step of the model is under way."""
        self.settle()
        with self._lock:
            self.places.forget(name)
        model = self._models.pop(name, None)
        if model is not None:
            self._swapper.settle()  # another model may have its place already, and its own copies go on
            model.host.blob.close()

    def settle(self) -> None:
        """Free places whose chunk was given up and has ended on the device since."""
        with self._lock:
            running = []
            for place, lane, chunk in self._given_up:
                if lane.memory.is_drained:
                    self.places.release(place)
                else:
                    running.append((place, lane, chunk))
            self._given_up = running

    @contextmanager
    def taken(self, name: str, lane: WorkerLane, unfinished: Callable[[], object | None]) -> Iterator[InPlace]:
        """The model in place, or on its way there, for a chunk of `lane`, which is idle.

        unfinished: asked when this is left: what holds the memory that the chunk's kernels use, if they have not ended.
        It is kept until they have.
        """
        self.settle()
        model = self[name]
        with self._lock:
            place, is_in_place = self.places.take(name, model.host.num_bytes)
            if not is_in_place:
                self._bring_to(place, model)
        try:
            yield place.held
        finally:
            chunk = unfinished()
            if chunk is None:
                self.places.release(place)
            else:
                with self._lock:
                    self._given_up.append((place, lane, chunk))
        if not is_in_place:
            self._tell(name, place.held)

    def bring_next(self, name: str | None) -> None:
        """Begin to bring in the model that comes next, where memory holds it beside the present one."""
        model = None if name is None else self._models.get(name)
        if name is not None and model is not None:
            self._bring(name, model, may_replace=True)

    def _bring(self, name: str, model: PrefillModel, *, may_replace: bool) -> None:
        with self._lock:
            place = self.places.spare(name, model.host.num_bytes, may_replace=may_replace)
            if place is not None:
                self._bring_to(place, model)

    def _bring_to(self, place: Place, model: PrefillModel) -> None:
        try:
            place.held = self._swapper.bring(model.host, place)
        except BaseException:
            place.model, place.is_busy = None, False  # nothing whole lies there
            raise

    def _tell(self, name: str, in_place: InPlace) -> None:
        seconds = in_place.seconds()
        if seconds:
            size = self._models[name].host.num_bytes if name in self._models else 0
            logger.info("%s: %s came in %.3f s, %.1f GB/s", self._rank, name, seconds, size / seconds / 1e9)

    @property
    def host_bytes(self) -> int:
        return sum(model.host.num_bytes for model in tuple(self._models.values()))

    def consumers(self) -> Mapping[str, int]:
        return {"places of whole models": self.places.num_bytes}


def attention_of(weights: WholeWeights) -> AttentionWeights:
    """The half that knows no FFN. Its head is never used: the home samples."""
    layers = tuple(layer.attention for layer in weights.layers)
    return AttentionWeights(embed=weights.embed, final_norm=weights.final_norm, head=weights.embed, layers=layers)


def warm_up(
    kernels: Launcher,
    site: Site,
    host: HostModel,
    geometry: PageGeometry,
    lanes: WorkerLanes,
) -> dict[GQASpec | MLASpec, SpanGraphs]:
    """Load all that chunks of the model need, with one layer of every kind on the device, and capture its spans.

    In a frame of its own: what is frame 0 to this model is a prompt's KV to one with smaller pages.
    """
    spec, device, streams = host.spec, site.device, lanes.prefill_streams()
    kinds = _first_of_each_kind(spec)
    layers = {number: mapped(host.weights.layers[number], lambda tensor: tensor.to(device)) for number in kinds}
    own = [layers[_kind(spec, number, kinds)] for number in range(spec.num_layers)]
    few = WholeWeights(
        embed=host.weights.embed[:64].to(device), final_norm=host.weights.final_norm.to(device), layers=tuple(own)
    )
    frame = torch.zeros(1, geometry.frame_bytes, dtype=torch.uint8, device=device)
    finish(device)
    warm_up_attention(kernels, spec, attention_of(few), frame, geometry, streams.by_share.values())
    warm_up_ffn(kernels, [layer.ffn for layer in own], [layer.router for layer in own], streams.by_share.values())
    return capture_spans(spec, device, lanes.capture_streams.by_share)


def _first_of_each_kind(spec: ModelSpec) -> tuple[int, ...]:
    return tuple({layer: number for number, layer in reversed(list(enumerate(spec.layers)))}.values())


def _kind(spec: ModelSpec, number: int, kinds: tuple[int, ...]) -> int:
    return next(first for first in kinds if spec.layers[first] == spec.layers[number])
