"""The weights pool's CUDA worker: takes models, links and steps, and gives each step to what runs it.

A step is one graph replay per pass, and a wait for its end (`ffn_step.py`). A run of steps is in `ffn_run.py`, a chunk
of prompts in `ffn_chunk_run.py`.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from crosspool.backends.base import HalfStep, Inlet, LaneLinks, NewLink, Outlet, Progress
from crosspool.backends.cuda.channels.link import DeviceOutlet, Site
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_support import has_chunk_kernels, runs_in_pieces
from crosspool.backends.cuda.chunks.chunk_warm_up import warm_up_ffn
from crosspool.backends.cuda.device.device_memory import naming_consumers, remainder
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.joined import IdleInlet, JoinedLink
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.random_slices import draw_share, num_bytes
from crosspool.backends.cuda.loading.streaming import stream_share
from crosspool.backends.cuda.loading.weights import pack_ffn_weights
from crosspool.backends.cuda.steps.lane import device_inlets, enter, finish
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.steps.lanes import WorkerLanes
from crosspool.backends.cuda.steps.passes import PASS_TOKENS, bucket_of
from crosspool.backends.cuda.weights_rank.ffn_chunk_run import run_ffn_chunk
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNModel, FFNPasses, FFNPassKind, FFNWay
from crosspool.backends.cuda.weights_rank.ffn_prepare import prepare_passes
from crosspool.backends.cuda.weights_rank.ffn_run import run_several
from crosspool.backends.cuda.weights_rank.ffn_step import run_step
from crosspool.backends.cuda.weights_rank.fused_turns import FusedTurns
from crosspool.backends.cuda.weights_rank.patience import Patience
from crosspool.backends.cuda.weights_rank.resident_ffn import ResidentFFN
from crosspool.cluster.base import ModelPlacement
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import ModelSpec
from crosspool.pools_config import Control
from crosspool.scheduler.step import StepDescriptor, StepHeader

logger = logging.getLogger(__name__)


class CudaFFNWorker:
    """Implements `backends.base.FFNWorker` on one device. `rank` tells this worker its slice of each model."""

    def __init__(
        self,
        site: Site,
        kernels: Launcher,
        rule: WaitRule,
        *,
        control: Control = "graphs",
        order: str = "priority",
        goes_ahead: bool = False,
        run_lanes: int = 0,
    ) -> None:
        """order: of `ClusterConfig`; under any but priority, prompts' kernels have decode's priority beside it.

        run_lanes: of `CudaAttentionWorker`.
        """
        self._site, self._kernels = site, kernels
        self._resident = ResidentFFN(site, kernels) if control == "resident" else None
        self._models: dict[str, FFNModel] = {}
        self._lanes = WorkerLanes(site, rule, kernels, is_host_driven=control == "host", goes_ahead=goes_ahead)
        self._passes = FFNPasses(site, kernels, is_host_driven=control == "host")
        self._run_lanes = run_lanes
        self._fit: dict[int, int] = {}  # by lane: the step that was found fit to be handed over ahead
        self._joined: set[str] = set()  # KV ranks that run this worker's layers themselves
        is_cuda = site.device.type == "cuda"
        self._make_event = partial(torch.cuda.Event, enable_timing=True) if is_cuda else None
        self._patience = Patience(self._make_event, has_any=order == "priority")
        self._turns = FusedTurns(may_fuse=is_cuda and kernels.is_hopper and site.is_alone)

    def join(self, kv_rank: str) -> None:
        """Leave the steps of this KV rank to it (`half_of`, `chunks_of`): it shares this process and GPU."""
        self._joined.add(kv_rank)
        self._patience = Patience(self._make_event)  # whatever `order`: no segment waits for another

    @property
    def patience(self) -> Patience:
        return self._patience

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        if self._site.rank not in placement.weights_ranks:
            raise ValueError(f"{placement.name} is placed on {placement.weights_ranks}, not on rank {self._site.rank}")
        enter(self._site.device)
        with nullcontext() if self._resident is None else self._resident.away():
            self._load(placement, progress)

    def _load(self, placement: ModelPlacement, progress: Progress) -> None:
        rank = self._site.rank
        directory = read_model_dir(placement.directory)
        index, count = placement.weights_ranks.index(rank), len(placement.weights_ranks)
        shares = placement.weights_shares or None
        device = self._site.device
        with naming_consumers(rank, device, f"the FFN weights of {placement.name}", self._consumers):
            if placement.has_random_weights:
                _, layers = draw_share(directory.spec, "weights", device, progress, index, count, shares)
            else:
                _, layers = stream_share(directory, "weights", device, progress, index, count, shares)
        packed = pack_ffn_weights(directory.spec, iter(layers))
        self.add_weights(placement.name, directory.spec, packed, takes_choices=placement.route == "kv")
        self._models[placement.name].is_split = placement.kv_split != "one"
        try:
            self._prepare(placement, progress)
        except BaseException:
            self.remove_model(placement.name)
            raise

    def add_weights(
        self, name: str, spec: ModelSpec, layers: Sequence[FFNLayerWeights], *, takes_choices: bool = False
    ) -> None:
        """The same with weights that are on the device already. takes_choices: passes' experts come with their rows."""
        finish(self._site.device)
        self._models[name] = FFNModel(spec, tuple(layers), takes_choices)

    def _prepare(self, placement: ModelPlacement, progress: Progress) -> None:
        """On a GPU: load what chunks need, and capture the model's passes for every lane that is open."""
        if self._site.device.type != "cuda":
            return
        begin_s, name, model = time.monotonic(), placement.name, self._models[placement.name]
        total = num_bytes(model.layers)
        if has_chunk_kernels(model.spec):
            routers = model.chunk_routers()
            for number in self._lanes.numbers():
                self._passes.chunks_of(model, number)
            finish(self._site.device)
            warm_up_ffn(self._kernels, model.layers, routers, self._lanes.prefill_streams().all)

        def tell() -> None:
            progress(total, total)  # a load that was given up ends here

        # no lane is open where a KV rank beside this one runs the passes
        for number, lane, links in self._lanes.open_to([placement.kv_rank]):
            way = FFNWay(name, model, number, lane, links)
            may_fuse, may_run = self._turns.may_fuse, number < self._run_lanes
            prepare_passes(self._passes, self._resident, way, tell, may_fuse=may_fuse, may_run=may_run)
        logger.info("%s: passes of %s are ready after %.2f s", self._site.rank, name, time.monotonic() - begin_s)

    def open_link(self, new: NewLink) -> tuple[Outlet, Inlet]:
        """This rank's ends of the lane's channels with a KV rank."""
        if new.peer in self._joined:
            return DeviceOutlet(JoinedLink(), new.ring), IdleInlet()
        return self._lanes[new.lane].open_link(new, is_kv=False)

    def close_links(self, peer: str) -> None:
        if self._resident is not None:
            linked = [lane for lane in self._lanes if peer in lane.links]
            for lane in linked:
                if not lane.memory.is_drained:
                    lane.memory.abort_all()
            self._resident.drop(links=[lane.links[peer] for lane in linked])
        self._lanes.close_links(peer)

    def run(self, header: StepHeader, links: LaneLinks) -> HalfStep[None]:
        model = self._models.get(header.model)
        if model is None:
            raise ValueError(f"model {header.model!r} is not on rank {self._site.rank}; it has {sorted(self._models)}")
        if header.kv_rank in self._joined:
            return
        lane = self._lanes[header.lane]
        (inlet,) = device_inlets(links.inlets.values())
        way = FFNWay(header.model, model, header.lane, lane, (inlet.link,))
        found, resident, turns = self._passes, self._resident, self._turns
        if not model.is_split and runs_in_pieces(header, model.spec):
            beside = self._lanes.neighbours_of(lane, is_fixed=not self._site.is_alone)
            yield from run_ffn_chunk(self._kernels, found, resident, turns, header, way, inlet, beside, self._patience)
            return
        is_ahead = self._fit.pop(header.lane, 0) == header.step_seq
        if not is_ahead and (busy := lane.before_begin((inlet,))) is not None:
            yield busy
        try:
            if header.num_steps > 1:
                yield from run_several(found, resident, header, way, inlet, is_ahead=is_ahead)
            else:
                yield from run_step(found, resident, turns, header, way, inlet, is_ahead=is_ahead)
        finally:
            lane.memory.nears_end = False  # what comes next has to be on the device first

    def may_begin_ahead(self, work: StepDescriptor | StepHeader) -> bool:
        """Whether a step may be handed to the device now (`cluster.worker.BeginsAhead`): nothing may wait for that.

        Single steps are, where a server takes them: launched ones may be fused, in turn with prompts.
        """
        header = work.header if isinstance(work, StepDescriptor) else work
        lane = self._lanes[header.lane]
        model = self._models.get(header.model)
        if model is None or model.is_split or header.phase != "decode" or header.num_tokens > PASS_TOKENS:
            return False
        if lane.stream is None or not lane.memory.nears_end or header.kv_rank in self._joined:
            return False
        bucket = bucket_of(header.num_tokens)
        if self._resident is not None:
            is_fit = self._resident.can_serve_ahead(header.model, header.lane, lane, bucket)
        else:
            kind = FFNPassKind(bucket, False)
            is_fit = header.num_steps > 1 and lane.captured(header.model, kind, in_loop=True) is not None
        if is_fit:
            self._fit[header.lane] = header.step_seq
        return is_fit

    def has(self, model: str) -> bool:
        return model in self._models

    def half_of(self, model: str, lane: int) -> FFNHalf:
        """The model's layers for passes of a lane; a KV rank beside this one, which `join` names, runs them itself."""
        return self._passes.half_of(self._models[model], lane)

    def chunks_of(self, model: str, lane: int) -> ChunkFFN:
        """The same for its chunks."""
        return self._passes.chunks_of(self._models[model], lane)

    def remove_model(self, model: str) -> None:
        if self._resident is not None:
            self._resident.drop(model)
        self._lanes.drop(model)
        self._models.pop(model, None)

    def _consumers(self) -> dict[str, int]:
        """Bytes by what they are for, each model's weights apart."""
        return {f"FFN weights of {name}": num_bytes(model.layers) for name, model in tuple(self._models.items())}

    def memory_bytes(self) -> Mapping[str, int]:
        weights = sum(num_bytes(model.layers) for model in tuple(self._models.values()))
        known = {"ffn_weights": weights, "kv_cache": 0, **self._lanes.memory_bytes()}
        return known | remainder(self._site.rank, self._site.device, known)
