"""The weights pool's CUDA worker: a step is one graph replay per pass, and a wait for its end."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from crosspool.backends.base import HalfStep, Inlet, LaneLinks, Outlet, Progress, Wait
from crosspool.backends.cuda.chunk_crossing import ChunkCrossing
from crosspool.backends.cuda.chunk_ffn import ChunkFFN, chunk_routers
from crosspool.backends.cuda.chunk_plan import chunk_plan
from crosspool.backends.cuda.chunk_run import run_pieces
from crosspool.backends.cuda.chunk_support import is_supported, runs_in_pieces
from crosspool.backends.cuda.chunk_warm_up import warm_up_ffn
from crosspool.backends.cuda.decode_run import LAST_NAP_S, places, rest_of_run
from crosspool.backends.cuda.device_memory import naming_consumers, remainder
from crosspool.backends.cuda.ffn_chunk import ffn_chunk
from crosspool.backends.cuda.ffn_half import FFNHalf
from crosspool.backends.cuda.ffn_pass import FFNPass, SumsBy
from crosspool.backends.cuda.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.joined import IdleInlet, JoinedLink
from crosspool.backends.cuda.lane import LaneIdle, Links, WorkerLane, device_inlets, enter, finish, prefill_streams
from crosspool.backends.cuda.lane_memory import RunPlace, WaitRule
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.link import OPEN_EPOCH, DeviceInlet, DeviceOutlet, Site
from crosspool.backends.cuda.passes import PASS_TOKENS, bucket_of, passes
from crosspool.backends.cuda.prepare import COMMON_BUCKETS, open_lanes
from crosspool.backends.cuda.random_slices import draw_share, num_bytes
from crosspool.backends.cuda.resident_ffn import ResidentFFN
from crosspool.backends.cuda.streaming import stream_share
from crosspool.backends.cuda.transport import FFNCrossing
from crosspool.backends.cuda.weights import pack_ffn_weights
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.config import Control
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import StepHeader, epoch


@dataclass
class FFNModel:
    """One model's slice on this rank; each lane has its own scratch, fused passes too."""

    spec: ModelSpec
    layers: tuple[FFNLayerWeights, ...]
    takes_choices: bool = False
    halves: dict[tuple[int, bool], FFNHalf] = field(default_factory=dict)
    routers: list[torch.Tensor | None] | None = None  # of chunks, once there was one
    chunks: dict[int, ChunkFFN] = field(default_factory=dict)
    is_split: bool = False  # over several KV ranks, which run prompts in passes


class CudaFFNWorker:
    """Implements `backends.base.FFNWorker` on one device. `rank` tells this worker its slice of each model."""

    def __init__(self, site: Site, kernels: Launcher, rule: WaitRule, *, control: Control = "graphs") -> None:
        self._site, self._kernels, self._rule, self._control = site, kernels, rule, control
        self._resident = ResidentFFN(site, kernels) if control == "resident" else None
        self._models: dict[str, FFNModel] = {}
        self._lanes: dict[int, WorkerLane] = {}
        self._joined: set[str] = set()  # KV ranks that run this worker's layers themselves
        self._chunk_lanes: set[int] = set()  # that have a prompt's kernels under way
        self._fused_lanes: set[int] = set()  # that have fused passes under way
        is_alone = list(site.devices.values()).count(site.index) <= 1
        self._may_fuse = site.device.type == "cuda" and kernels.is_hopper and is_alone

    def join(self, kv_rank: str) -> None:
        """Leave the steps of this KV rank to it (`half_of`, `chunks_of`): it shares this process and GPU."""
        self._joined.add(kv_rank)

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        rank = self._site.rank
        if rank not in placement.weights_ranks:
            raise ValueError(f"{placement.name} is placed on {placement.weights_ranks}, not on rank {rank}")
        enter(self._site.device)
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
        if self._site.device.type == "cuda":
            self.prepare(placement, progress)

    def add_weights(
        self, name: str, spec: ModelSpec, layers: Sequence[FFNLayerWeights], *, takes_choices: bool = False
    ) -> None:
        """The same with weights that are on the device already. takes_choices: passes' experts come with their rows."""
        finish(self._site.device)
        self._models[name] = FFNModel(spec, tuple(layers), takes_choices)

    def prepare(self, placement: ModelPlacement, progress: Progress) -> None:
        """Load what chunks need, and capture the model's common passes for every lane that is open."""
        model, total = self._models[placement.name], num_bytes(self._models[placement.name].layers)
        if is_supported(model.spec):
            model.routers = chunk_routers(model.layers)
            for number in tuple(self._lanes):
                self._chunk_ffn(model, number)
            finish(self._site.device)
            warm_up_ffn(self._kernels, model.layers, model.routers, prefill_streams(self._lanes, self._site))
        for number, lane in sorted(self._lanes.items()):  # none where a KV rank beside this one runs the passes
            for _, links in open_lanes([lane], [placement.kv_rank]):
                kinds = product(COMMON_BUCKETS, (False, True) if self._may_fuse else (False,))
                for bucket, is_fused in kinds:
                    self._pass(placement.name, number, model, lane, links, PassKind(bucket, is_fused))
                    progress(total, total)  # a load that was given up ends here

    def open_link(
        self,
        lane: int,
        peer: str,
        region: memoryview,
        capacity: int,
        ring: Callable[[], None],
        is_far: bool = False,
    ) -> tuple[Outlet, Inlet]:
        """This rank's ends of the lane's channels with a KV rank."""
        if peer in self._joined:
            return DeviceOutlet(JoinedLink(), ring), IdleInlet()
        return self._lane(lane).open_link(peer, region, capacity, False, ring)

    def close_links(self, peer: str) -> None:
        if self._resident is not None:
            links = [lane.links[peer] for lane in self._lanes.values() if peer in lane.links]
            for lane in self._lanes.values():
                if peer in lane.links and not lane.memory.is_drained:
                    lane.memory.abort_all()
            self._resident.drop(links=links)
        for lane in self._lanes.values():
            lane.close_link(peer)

    def run(self, header: StepHeader, links: LaneLinks) -> HalfStep[None]:
        model = self._models.get(header.model)
        if model is None:
            raise ValueError(f"model {header.model!r} is not on rank {self._site.rank}; it has {sorted(self._models)}")
        if header.kv_rank in self._joined:
            return
        lane = self._lane(header.lane)
        (inlet,) = device_inlets(links.inlets.values())
        if not model.is_split and runs_in_pieces(header, model.spec):
            yield from self._run_chunk(header, model, lane, inlet)
            return
        yield Wait((LaneIdle(lane.memory), inlet), OPEN_EPOCH)
        if header.num_steps > 1:
            yield from self._run_several(header, model, lane, inlet)
            return
        plan = passes(header.num_tokens, header.step_seq, model.spec.num_layers)
        last_epoch = plan[-1].base + model.spec.num_layers
        has_ended = False
        try:
            is_served = self._resident is not None and self._resident.can_serve(lane)
            if self._resident is not None and not is_served:
                self._resident.before_launch(lane)
            # A fused layer takes the whole GPU: lanes then take turns, layer by layer, but it would wait for a prompt's
            # kernels.
            is_fused = self._may_fuse and not is_served and not self._chunk_lanes
            if is_fused:
                self._fused_lanes.add(header.lane)
            for part in plan:
                if self._resident is not None and is_served:
                    self._resident.post(
                        header.model,
                        model.layers,
                        header.lane,
                        lane,
                        (inlet.link,),
                        part.bucket,
                        part.base,
                        takes_choices=model.takes_choices,
                    )
                    continue
                kind = PassKind(part.bucket, is_fused)
                source = self._pass(header.model, header.lane, model, lane, (inlet.link,), kind)
                lane.memory.push(part.base, model.spec.num_layers)
                if lane.stream is not None:
                    yield from lane.run_pass(header.model, (inlet.link,), kind, (inlet,), part.base)
                    continue
                for layer in source.kernels():
                    yield Wait((inlet,), part.base + layer + 1)
            yield Wait((inlet,), last_epoch)
            has_ended = True
        finally:
            self._fused_lanes.discard(header.lane)
            if not has_ended:
                lane.give_up(last_epoch)

    def _run_several(self, header: StepHeader, model: FFNModel, lane: WorkerLane, inlet: DeviceInlet) -> HalfStep[None]:
        """A run by one graph, or by passes posted to the server; the KV rank may end it early."""
        num_layers, bucket = model.spec.num_layers, bucket_of(header.num_tokens)
        steps, last_epoch = places(header, num_layers), epoch(header.step_seq, header.num_steps * num_layers - 1)
        links = (inlet.link,)
        has_ended = False
        try:
            if self._resident is not None and self._resident.can_serve(lane):
                for base, place in steps:
                    self._resident.post(
                        header.model,
                        model.layers,
                        header.lane,
                        lane,
                        links,
                        bucket,
                        base,
                        takes_choices=model.takes_choices,
                        place=place,
                    )
            else:
                if self._resident is not None:
                    self._resident.before_launch(lane)
                # Not fused: a prompt would have to wait for the whole run, and within a graph that repeats itself a
                # cooperative kernel has not been tried on a GPU.
                kind = PassKind(bucket, False)
                source = self._pass(header.model, header.lane, model, lane, links, kind)
                if lane.stream is None:
                    yield from self._run_emulated(source, steps, lane, inlet, num_layers)
                else:
                    for base, place in steps:
                        lane.memory.push(base, num_layers, place=place)
                    lane.run_loop(header.model, links, kind)
            begun_s = time.monotonic()
            yield Wait((inlet,), last_epoch, (), LAST_NAP_S, rest_of_run(lane.memory, header.num_steps))
            lane.memory.step_s = (time.monotonic() - begun_s) / header.num_steps
            has_ended = True
        finally:
            if not has_ended:
                lane.give_up(last_epoch)

    def _run_emulated(
        self,
        source: FFNPass,
        steps: list[tuple[int, RunPlace]],
        lane: WorkerLane,
        inlet: DeviceInlet,
        num_layers: int,
    ) -> HalfStep[None]:
        """Kernels without a device, which run in turn: the loop looks itself whether more rows come."""
        for base, place in steps:
            if place.step:
                yield Wait((inlet,), base + 1)
                if inlet.arrived(place.over):
                    return
            lane.memory.push(base, num_layers)
            for layer in source.kernels():
                yield Wait((inlet,), base + layer + 1)

    def _run_chunk(self, header: StepHeader, model: FFNModel, lane: WorkerLane, inlet: DeviceInlet) -> HalfStep[None]:
        plan = chunk_plan(header.num_tokens, header.step_seq, model.spec.num_layers)
        yield Wait((LaneIdle(lane.memory), inlet), OPEN_EPOCH)
        ffn = self._chunk_ffn(model, header.lane)
        crossing = ChunkCrossing(self._kernels, lane.memory, [inlet.link.map()], plan, model.spec.hidden_size)
        has_ended = False
        self._chunk_lanes.add(header.lane)
        try:
            fused = tuple(LaneIdle(self._lanes[number].memory) for number in sorted(self._fused_lanes))
            if fused:  # else each of their layers would wait for the chunk; passes that follow are not fused
                yield Wait(fused, OPEN_EPOCH)
            if self._resident is not None:
                self._resident.before_launch(lane)
            kernels = ffn_chunk(ffn, crossing, plan)
            yield from run_pieces(self._kernels, lane, (inlet,), plan, kernels, lambda: self._decodes_beside(lane))
            yield Wait((inlet,), plan.last_epoch)
            has_ended = True
        finally:
            self._chunk_lanes.discard(header.lane)
            if not has_ended:
                lane.give_up(plan.last_epoch)

    def _chunk_ffn(self, model: FFNModel, number: int) -> ChunkFFN:
        found = model.chunks.get(number)
        if found is None:
            if model.routers is None:
                model.routers = chunk_routers(model.layers)
            found = model.chunks[number] = ChunkFFN(self._kernels, model.layers, model.routers)
            finish(self._site.device)
        return found

    def has(self, model: str) -> bool:
        return model in self._models

    def half_of(self, model: str, lane: int, *, is_fused: bool = False) -> FFNHalf:
        """The model's layers for passes of a lane; a KV rank beside this one, which `join` names, runs them itself."""
        held = self._models[model]
        half = held.halves.get((lane, is_fused))
        if half is None:
            half = FFNHalf(self._kernels, held.layers, PASS_TOKENS, fused=is_fused)
            held.halves[lane, is_fused] = half
        return half

    def chunks_of(self, model: str, lane: int) -> ChunkFFN:
        """The same for its chunks."""
        return self._chunk_ffn(self._models[model], lane)

    def _decodes_beside(self, lane: WorkerLane) -> bool:
        now_s = time.monotonic()
        return any(other.decodes(now_s) for other in self._lanes.values() if other is not lane)

    def remove_model(self, model: str) -> None:
        if self._resident is not None:
            self._resident.drop(model)
        for lane in self._lanes.values():
            lane.drop(model)
        self._models.pop(model, None)

    def _consumers(self) -> dict[str, int]:
        """Bytes by what they are for, each model's weights apart."""
        return {f"FFN weights of {name}": num_bytes(model.layers) for name, model in tuple(self._models.items())}

    def memory_bytes(self) -> Mapping[str, int]:
        weights = sum(num_bytes(model.layers) for model in tuple(self._models.values()))
        known = {
            "ffn_weights": weights,
            "kv_cache": 0,
            "graphs": sum(lane.graph_bytes for lane in self._lanes.values()),
            "channels": sum(lane.channel_bytes for lane in self._lanes.values()),
        }
        return known | remainder(self._site.device, known)

    def _lane(self, number: int) -> WorkerLane:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = WorkerLane(
                self._site, self._rule, self._kernels, is_host_driven=self._control == "host"
            )
        return lane

    def _pass(
        self, name: str, number: int, model: FFNModel, lane: WorkerLane, links: Links, kind: "PassKind"
    ) -> FFNPass:
        def make() -> FFNPass:
            half = self.half_of(name, number, is_fused=kind.is_fused)
            crossing = FFNCrossing(self._kernels, lane.memory, links[0].map())
            hidden = model.spec.hidden_size
            # emulated kernels run in turn, and the host sees flags alone
            has_words = self._site.device.type == "cuda" and self._control != "host"
            sums_by: SumsBy = "words" if has_words else "flags"
            return FFNPass(
                self._kernels,
                lane.memory,
                half,
                crossing,
                kind.bucket,
                hidden,
                sums_by=sums_by,
                takes_choices=model.takes_choices,
            )

        source = lane.find_pass(name, links, kind, make)
        assert isinstance(source, FFNPass)
        return source


@dataclass(frozen=True)
class PassKind:
    """What a captured pass was made for. is_fused: a layer is one kernel, which holds the whole GPU."""

    bucket: int
    is_fused: bool
