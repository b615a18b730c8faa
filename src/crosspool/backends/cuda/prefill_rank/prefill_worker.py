"""A prefill rank on a GPU: whole models that take turns on it compute chunks of prompts and hand their KV over."""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from crosspool.backends.base import HalfStep, Inlet, LaneLinks, NewLink, Outlet, Progress, Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH, Site
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_rows import ChunkRows
from crosspool.backends.cuda.chunks.chunk_run import run_pieces
from crosspool.backends.cuda.chunks.prefill_piece import Library
from crosspool.backends.cuda.device.device_memory import naming_consumers, remainder
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.uploads import upload_all
from crosspool.backends.cuda.prefill_rank.handed_plan import HandedPlan, handed_plan
from crosspool.backends.cuda.prefill_rank.handed_rank import Prompt, handed_chunk
from crosspool.backends.cuda.prefill_rank.handed_slots import HandedCrossing, SlotPlaces, earlier_places
from crosspool.backends.cuda.prefill_rank.host_model import load_whole
from crosspool.backends.cuda.prefill_rank.prefill_models import ModelsInTurn, PrefillModel, attention_of, warm_up
from crosspool.backends.cuda.prefill_rank.swap import InPlace
from crosspool.backends.cuda.steps.lane import WorkerLane, device_inlets, enter, finish
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.steps.lanes import WorkerLanes
from crosspool.backends.cuda.steps.step_on_device import StepOnDevice
from crosspool.cluster.base import ModelPlacement
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import StepDescriptor
from crosspool.units import ceil_div

PLACE_POLL_S = 0.05
REMEDY = "lower prefill_pool_bytes, or place the prefill rank on a GPU of its own"


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A chunk's rows with pages in turn of a cache that lives as long as the chunk, page 0 left out."""

    rows: ChunkRows
    num_pages: int
    num_cached: list[int]
    sampled: list[int]  # tokens of the step whose rows the home samples from


class CudaPrefillWorker:
    """Implements `backends.base.PrefillWorker`. One lane at a time uses it, as the engine gives it one."""

    def __init__(self, site: Site, kernels: Launcher, rule: WaitRule, room_bytes: int) -> None:
        """room_bytes: device memory for whole models."""
        self._site, self._kernels = site, kernels
        self._models = ModelsInTurn(site, room_bytes)
        self._lanes = WorkerLanes(site, rule, kernels)
        self._cache = torch.zeros(0, dtype=torch.uint8, device=site.device)
        self._growing = threading.Lock()  # a load and a chunk may both ask for more

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        site, name = self._site, placement.name
        if site.rank not in placement.prefill_ranks:
            raise ValueError(f"{name} is placed on {placement.prefill_ranks}, not on rank {site.rank}")
        enter(site.device)
        directory = read_model_dir(placement.directory)
        geometry = _one_layer(directory.spec, placement)
        host = load_whole(directory, placement, site, progress)
        try:
            with naming_consumers(site.rank, site.device, f"a place for {name}", self._models.consumers, REMEDY):
                while not self._models.make_room(name, host.num_bytes):
                    progress(host.num_bytes, host.num_bytes)  # a load that was given up ends here
                    time.sleep(PLACE_POLL_S)
                self._room(geometry, 1 + geometry.num_pages(placement.context_tokens))
                spans = {}
                if site.device.type == "cuda":
                    spans = warm_up(self._kernels, site, host, geometry, self._lanes)
        except BaseException:
            host.blob.close()
            raise
        self._models.add(name, PrefillModel(host, geometry, spans))

    def open_link(self, new: NewLink) -> tuple[Outlet, Inlet]:
        """This rank's ends of the lane's channels with a home."""
        return self._lanes[new.lane].open_link(new, is_kv=False)

    def close_links(self, peer: str) -> None:
        self._lanes.close_links(peer)

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[None]:
        header, model = step.header, self._models[step.header.model]
        (inlet,) = device_inlets(links.inlets.values())
        lane = self._lanes[header.lane]
        prompt = prompt_rows(step, model.geometry.page_tokens)
        yield Wait((lane.idle, inlet), OPEN_EPOCH)
        link, spec = inlet.link.map(), model.host.spec
        most = 4 * link.inbox.capacity // model.geometry.token_layer_bytes
        plan = handed_plan(header.num_tokens, sum(prompt.num_cached), header.step_seq, spec.num_layers, most)
        enqueued: Iterator[int] | None = None
        with self._models.taken(header.model, lane, lambda: enqueued) as in_place:
            self._models.bring_next(header.next_model)
            crossing = HandedCrossing(self._kernels, lane.memory, link)
            enqueued = self._chunk(model, in_place, prompt, crossing, plan, lane)
            with StepOnDevice(lane, plan.last_epoch):
                yield from run_pieces(self._kernels, lane, (inlet,), plan, enqueued, lambda: not self._site.is_alone)
                yield Wait((inlet,), plan.last_epoch)
                enqueued = None

    def _chunk(
        self,
        model: PrefillModel,
        in_place: InPlace,
        prompt: PromptRows,
        crossing: HandedCrossing,
        plan: HandedPlan,
        lane: WorkerLane,
    ) -> Iterator[int]:
        kernels, spec, layers = self._kernels, model.host.spec, in_place.weights.layers
        libraries = {
            shape: Library(graphs, lambda: lane.prefill_streams.is_shared) for shape, graphs in model.spans.items()
        }

        def make() -> Prompt:
            rows, attention = prompt.rows, attention_of(in_place.weights)
            frames = self._room(model.geometry, 1 + prompt.num_pages)
            half = ChunkHalf(kernels, spec, attention, frames, model.geometry, rows, plan.chunk, None, libraries)
            own = (rows.row_of_token.astype(np.int32), rows.positions.astype(np.int32))
            places = upload_all([*own, *earlier_places(prompt.num_cached)], frames.device)
            ffn = ChunkFFN(kernels, [layer.ffn for layer in layers], [layer.router for layer in layers])
            return Prompt(half, ffn, SlotPlaces(*places[:2]), SlotPlaces(*places[2:]))

        return handed_chunk(in_place, make, crossing, plan, prompt.sampled)

    def _room(self, geometry: PageGeometry, num_frames: int) -> torch.Tensor:
        """(num_frames, frame_bytes) uint8: the cache of one layer of a chunk, which all models share.

        Where it has to grow, which loads see to, whoever finds it finds zeros.
        """
        num_bytes = num_frames * geometry.frame_bytes
        with self._growing:
            if num_bytes > self._cache.nbytes:
                larger = torch.zeros(num_bytes, dtype=torch.uint8, device=self._site.device)
                finish(self._site.device)
                self._cache = larger
            cache = self._cache
        return cache[:num_bytes].view(num_frames, geometry.frame_bytes)

    def remove_model(self, model: str) -> None:
        self._lanes.drop(model)
        self._models.remove(model)

    def memory_bytes(self) -> Mapping[str, int]:
        known = {
            "whole_models": self._models.places.num_bytes,
            "kv_cache": int(self._cache.nbytes),
            **self._lanes.memory_bytes(),
        }
        return known | remainder(self._site.rank, self._site.device, known) | {"host_weights": self._models.host_bytes}


def _one_layer(spec: ModelSpec, placement: ModelPlacement) -> PageGeometry:
    width = spec.kv_elements_per_token_layer
    return PageGeometry(
        num_layers=1,
        elements_per_token_layer=width,
        element_bytes=2,
        page_tokens=placement.page_tokens,
        frame_bytes=2 * width * placement.page_tokens,
        model=placement.name,
    )


def prompt_rows(step: StepDescriptor, page_tokens: int) -> PromptRows:
    """Raises ValueError for a row without tokens, as only decode has."""
    token_ids: list[int] = []
    sampled: list[int] = []
    tables, positions, counts = [], [], []
    page = 1
    for row in step.rows:
        if row.token_ids is None or len(row.token_ids) != row.num_new_tokens:
            raise ValueError(f"sequence {row.sequence_id} brings no tokens; a prefill rank runs prompts only")
        end = row.num_cached_tokens + row.num_new_tokens
        count = ceil_div(end, page_tokens)
        tables.append(np.arange(page, page + count, dtype=np.int64)[None])
        token_ids += row.token_ids
        positions.append(np.arange(row.num_cached_tokens, end))
        counts.append(row.num_new_tokens)
        if row.sample:
            sampled.append(len(token_ids) - 1)
        page += count
    if len(token_ids) != step.header.num_tokens:
        raise ValueError(f"the step's rows hold {len(token_ids)} tokens, its header says {step.header.num_tokens}")
    rows = ChunkRows(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.concatenate(positions),
        row_of_token=np.repeat(np.arange(len(counts)), counts),
        tables=tables,
    )
    return PromptRows(rows, page - 1, [row.num_cached_tokens for row in step.rows], sampled)
