"""The KV pool's CUDA worker: a step is one graph replay per pass, then sampling from what the device left."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from crosspool.backends.base import HalfStep, Inlet, LaneLinks, Outlet, Progress, Wait
from crosspool.backends.cuda.advance import release
from crosspool.backends.cuda.attention_pass import Crossing
from crosspool.backends.cuda.batch import Batch, IntArray, SampledRow
from crosspool.backends.cuda.chunk_crossing import ChunkCrossing
from crosspool.backends.cuda.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunk_plan import chunk_plan
from crosspool.backends.cuda.chunk_rows import ChunkRows
from crosspool.backends.cuda.chunk_run import run_pieces
from crosspool.backends.cuda.chunk_support import is_supported, runs_in_pieces
from crosspool.backends.cuda.chunk_warm_up import capture_spans, warm_up_attention
from crosspool.backends.cuda.decode_run import push_run, read_run, runs_on_device
from crosspool.backends.cuda.device_memory import naming_consumers, remainder
from crosspool.backends.cuda.exchange import TokenHome
from crosspool.backends.cuda.ffn_weights import pack_router
from crosspool.backends.cuda.frames import KVFrames
from crosspool.backends.cuda.head_exchange import HeadHome, cut_heads
from crosspool.backends.cuda.joined import JoinedCrossing, JoinedFFN, JoinedInlet, JoinedLink, await_ffn, joined_chunk
from crosspool.backends.cuda.kv_chunk import kv_chunk
from crosspool.backends.cuda.kv_pass import KVPass, KVRows
from crosspool.backends.cuda.kv_router import KVRouter, Routers
from crosspool.backends.cuda.kv_share import KVShare, ShareRows, answers, step_ranks
from crosspool.backends.cuda.lane import LaneIdle, Links, WorkerLane, device_inlets, enter, finish, prefill_streams
from crosspool.backends.cuda.lane_memory import WaitRule
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.link import OPEN_EPOCH, DeviceInlet, DeviceOutlet, Site
from crosspool.backends.cuda.outcome import Outcome
from crosspool.backends.cuda.passes import Pass, bucket_of, passes
from crosspool.backends.cuda.prefill_attention import Library
from crosspool.backends.cuda.prepare import COMMON_BUCKETS, open_lanes
from crosspool.backends.cuda.random_slices import draw_share
from crosspool.backends.cuda.sampling import fill_sampling, sampling_records
from crosspool.backends.cuda.sm_partition import PrefillStreams
from crosspool.backends.cuda.span_attention import SpanGraphs
from crosspool.backends.cuda.streaming import stream_share
from crosspool.backends.cuda.transport import AttentionCrossing
from crosspool.backends.cuda.weights import AttentionWeights, pack_attention_weights
from crosspool.backends.numpy.page_reader import PageReader
from crosspool.backends.numpy.sequences import Sequence
from crosspool.cluster.base import ModelPlacement
from crosspool.core import SampledToken
from crosspool.kv_pool.geometry import PageGeometry, page_geometry
from crosspool.kv_pool.split import KVSplit, cached_spec, share_of_heads
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec
from crosspool.models.tensors import ROUTER_TENSORS
from crosspool.scheduler.step import StepDescriptor, StepHeader, epoch, run_over
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
    split: KVSplit = "one"
    routers: Routers | None = None
    rows: dict[tuple[int, int], KVRows] = field(default_factory=dict)
    spans: dict[GQASpec | MLASpec, SpanGraphs] = field(default_factory=dict)


class CudaAttentionWorker:
    """Implements `backends.base.AttentionWorker` on one device, for all models; the cache holds bfloat16."""

    def __init__(
        self,
        site: Site,
        kernels: Launcher,
        rule: WaitRule,
        frames: KVFrames,
        *,
        first_frame: int | None = None,
        kv_ranks: SequenceOf[str] = (),
        is_host_driven: bool = False,
    ) -> None:
        """first_frame: number of this rank's frame 0 where there are several KV ranks, `kv_ranks` in their order."""
        self._site, self._kernels, self._rule, self._is_host_driven = site, kernels, rule, is_host_driven
        self._first_frame, self._kv_ranks, self._frames = first_frame, tuple(kv_ranks), frames
        finish(site.device)
        self._models: dict[str, KVModel] = {}
        self._shares: dict[str, KVShare] = {}
        self._lanes: dict[int, WorkerLane] = {}
        self._sequences: dict[int, Sequence] = {}
        self._joined: dict[str, JoinedFFN] = {}
        # emulated kernels run in turn, and the host sees flags alone
        self._has_words = site.device.type == "cuda" and not is_host_driven

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        enter(self._site.device)
        directory = read_model_dir(placement.directory)
        self.check(placement, directory.spec)
        index, num_ranks = placement.kv_ranks.index(self._site.rank), len(placement.kv_ranks)
        is_cut, is_share = placement.kv_split == "heads", placement.kv_split != "one" and index > 0
        if is_share and not is_cut:
            self.add_share(placement, directory.spec)
            return
        with naming_consumers(
            self._site.rank, self._site.device, f"the attention weights of {placement.name}", self._consumers
        ):
            also = ROUTER_TENSORS if placement.route == "kv" else frozenset[str]()
            if placement.has_random_weights:
                model, layers = draw_share(directory.spec, "kv", self._site.device, progress, also=also)
            else:
                model, layers = stream_share(directory, "kv", self._site.device, progress, also=also)
            spec = share_of_heads(directory.spec, index, num_ranks) if is_cut else directory.spec
            if is_cut:
                layers = _cut(directory.spec, layers, index, num_ranks)
            if is_share:
                model = {name: tensor[:0] for name, tensor in model.items()}
            weights = pack_attention_weights(spec, model, iter(layers))
            routers = [pack_router(layer) if "router" in layer else None for layer in layers] if also else None
        num_bytes = sum(tensor.nbytes for tensors in (model, *layers) for tensor in tensors.values())
        if is_share:
            self.add_share(placement, spec, weights, num_bytes)
            return
        self.add_weights(placement, spec, weights, num_bytes, routers)
        if self._site.device.type == "cuda":
            try:
                self.prepare(placement, progress)
            except BaseException:
                self._drop(placement.name)
                raise

    def check(self, placement: ModelPlacement, spec: ModelSpec) -> None:
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

    def add_weights(
        self,
        placement: ModelPlacement,
        spec: ModelSpec,
        weights: AttentionWeights,
        num_bytes: int,
        routers: Routers | None = None,
    ) -> None:
        """The same with weights that are on the device already. routers: where experts are chosen here."""
        geometry = self._geometry(placement, spec)
        frames, most = self._memory(placement, spec, geometry)
        split = placement.kv_split
        numbers = {peer: self._kv_ranks.index(peer) for peer in placement.kv_peers} if split != "one" else {}
        pages = self._pages(placement, geometry.frames_per_page)
        self._models[placement.name] = KVModel(
            spec, weights, num_bytes, geometry, frames, most, pages, numbers, split, routers
        )

    def add_share(
        self,
        placement: ModelPlacement,
        spec: ModelSpec,
        weights: AttentionWeights | None = None,
        num_bytes: int = 0,
    ) -> None:
        """Take part in the steps of a model whose home is another KV rank. weights: of this rank's heads, where cut."""
        geometry = self._geometry(placement, spec)
        frames, most = self._memory(placement, spec, geometry)
        pages = self._pages(placement, geometry.frames_per_page)
        number = self._kv_ranks.index(self._site.rank)
        self._shares[placement.name] = KVShare(
            spec, geometry, frames, most, number, pages, weights=weights, num_bytes=num_bytes
        )

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

    def prepare(self, placement: ModelPlacement, progress: Progress) -> None:
        """Load what chunks need, and capture the model's common passes for every lane that is open."""
        model = self._models[placement.name]
        if is_supported(model.spec) and model.split == "one":
            streams = prefill_streams(self._lanes, self._site)
            warm_up_attention(self._kernels, model.spec, model.weights, model.frames, model.geometry, streams)
            # Not on a lane's streams: what another thread enqueues there meanwhile would join the capture.
            own = PrefillStreams(self._site.driver, self._site.device, self._site.partition)
            model.spans = capture_spans(model.spec, self._site.device, own.by_share)
        if model.split != "one":
            return  # passes are captured for the shares that take part in them
        joined = self._joined_by(placement.weights_ranks)
        if joined is not None:
            await_ffn(joined, placement.name, lambda: progress(model.num_bytes, model.num_bytes))
        for number, lane in sorted(self._lanes.items()):
            for _, links in open_lanes([lane], placement.weights_ranks):
                for bucket in COMMON_BUCKETS:
                    self._pass(placement.name, model, number, links, PassKind(bucket, True, True), joined)
                    progress(model.num_bytes, model.num_bytes)  # a load that was given up ends here

    def join(self, rank: str, ffn: JoinedFFN) -> None:
        """Run the whole of models whose only weights rank is `rank`, which shares this process and GPU."""
        self._joined[rank] = ffn

    def open_link(
        self,
        lane: int,
        peer: str,
        region: memoryview,
        capacity: int,
        ring: Callable[[], None],
        is_far: bool = False,
    ) -> tuple[Outlet, Inlet]:
        """This rank's ends of the lane's channels with a weights rank, or another KV rank (is_far: the second)."""
        if peer in self._joined:
            joined = self._lane(lane)
            link = joined.links[peer] = JoinedLink()
            return DeviceOutlet(link, ring), JoinedInlet(joined.memory, link)
        return self._lane(lane).open_link(peer, region, capacity, not is_far, ring)

    def close_links(self, peer: str) -> None:
        for lane in self._lanes.values():
            lane.close_link(peer)

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        placed = self._frames.begin(step)
        try:
            return (yield from self._run(placed, links))
        finally:
            self._frames.end(step, self._lane(step.header.lane).memory)

    def _run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        name, number = step.header.model, step.header.lane
        model = self._models.get(name)
        if model is None:
            raise ValueError(f"model {name!r} is not on this KV rank; it has {sorted(self._models)}")
        self._join(step, model.spec, model.geometry, model.pages)
        batch = Batch(step.part(0), self._sequences, model.geometry.page_tokens)
        shares = self._taking_part(step, model, batch, links)
        inlets = device_inlets((*links.inlets.values(), *shares))
        lane, joined = self._lane(number), self._joined_by(links)
        if model.split == "one" and runs_in_pieces(step.header, model.spec):
            return (yield from self._run_chunk(step.header, model, lane, batch, inlets, joined))
        way = Way(model, lane, inlets, len(shares), joined)
        yield Wait((LaneIdle(lane.memory), *inlets), OPEN_EPOCH)
        if step.num_steps == 1:
            return (yield from self._run_step(step, 0, way, batch))
        if lane.stream is not None and not self._is_host_driven and runs_on_device(batch):
            return (yield from self._run_on_device(step, way, batch))
        return (yield from self._run_by_host(step, way, batch))

    def _run_on_device(self, step: StepDescriptor, way: "Way", batch: Batch) -> HalfStep[tuple[SampledToken, ...]]:
        """A run by one graph, its tokens read behind."""
        header, model, lane, links = step.header, way.model, way.lane, links_of(way.inlets)
        num_layers, kind = model.spec.num_layers, PassKind(bucket_of(header.num_tokens), True, True)
        source = self._pass(header.model, model, header.lane, links, kind, way.joined, way.num_shares)
        rows = kind.row_numbers(header.num_tokens)
        self._set_tables(lane, source, [batch.tables[row] for row in rows], batch.positions[rows])
        has_ended = False
        try:
            slots = push_run(lane.memory, batch, header, num_layers, kind.bucket, model.geometry.page_tokens)
            lane.run_loop(header.model, links, kind)
            sampled = yield from read_run(lane.memory, batch, step, slots, num_layers, way.inlets)
            has_ended = True
        finally:
            if not has_ended:
                lane.give_up(epoch(header.step_seq, header.num_steps * num_layers - 1))
        return sampled

    def _run_by_host(self, step: StepDescriptor, way: "Way", batch: Batch) -> HalfStep[tuple[SampledToken, ...]]:
        """A run step by step: rows that the host samples, and kernels without a device."""
        ended: set[int] = set()
        for idx in range(step.num_steps):
            if idx:
                batch = Batch(step.part(idx), self._sequences, way.model.geometry.page_tokens)
            sampled = yield from self._run_step(step, idx, way, batch)
            ended |= batch.ended(dict(enumerate(sampled)))
            left = step.num_steps - 1 - idx
            if left and len(ended) == len(batch.rows):
                batch.end_run(left)
                flags = [] if way.joined is not None else [inlet.link.map().outbox.flag for inlet in way.inlets]
                over = run_over(step.header.step_seq, step.num_steps, way.model.spec.num_layers)
                with torch.cuda.stream(way.lane.stream):
                    release(self._kernels, flags, over)
                break
            if left:
                yield Wait((), OPEN_EPOCH, sampled)
        return sampled

    def _run_step(self, step: StepDescriptor, idx: int, way: "Way", batch: Batch) -> HalfStep[tuple[SampledToken, ...]]:
        """One step, number `idx` of its run."""
        name, number, num_layers = step.header.model, step.header.lane, way.model.spec.num_layers
        lane, inlets, num_weights = way.lane, way.inlets, len(way.inlets) - way.num_shares
        plan = passes(step.header.num_tokens, step.header.step_seq, num_layers, idx)
        last_epoch = plan[-1].base + num_layers
        outcome = Outcome(batch, lane)
        has_ended = False
        try:
            for part in plan:
                sampled = [row for row in batch.sampled if part.start <= row.token < part.stop]
                is_decode = batch.num_rows_of(part.start, part.stop) == part.num_tokens
                kind = PassKind(part.bucket, bool(sampled), is_decode)
                source = self._pass(name, way.model, number, links_of(inlets), kind, way.joined, way.num_shares)
                slot = self._push(lane, source, batch, part, num_layers, sampled)
                if lane.stream is not None:
                    yield from lane.run_pass(name, links_of(inlets), kind, inlets, part.base)
                else:
                    for layer in source.kernels():
                        peers = inlets[:num_weights] if layer >= 0 else inlets[num_weights:]
                        yield Wait(peers, part.base + max(layer, ~layer) + 1)
                outcome.expect(part, slot, sampled, source.rows.half.logits_out)
            yield Wait(inlets, last_epoch)
            if outcome.is_copying():
                yield Wait((outcome,), last_epoch)
            has_ended = True
        finally:
            if not has_ended:
                lane.give_up(last_epoch)
        return outcome.finish()

    def run_share(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[None] | None:
        """The part of this rank in a step that another KV rank leads (`backends.base.ShareWorker`)."""
        name = step.header.model
        share = self._shares.get(name)
        if share is None:
            raise ValueError(f"this KV rank has no share of model {name!r}; it has {sorted(self._shares)}")
        self._join(step, share.spec, share.geometry, share.pages)
        rows = ShareRows(step, self._sequences, share.geometry.page_tokens)
        if not share.takes_part(rows):
            rows.commit()
            return None
        (inlet,) = device_inlets(links.exchange_inlets.values())
        return answers(self._kernels, share, step, rows, self._lane(step.header.lane), inlet)

    def _join(self, step: StepDescriptor, spec: ModelSpec, geometry: PageGeometry, pages: PageReader) -> None:
        for new in step.joining:
            self._sequences[new.sequence_id] = Sequence(
                new, step.header.model, geometry.frames_per_page, spec.vocab_size, pages
            )

    def _taking_part(self, step: StepDescriptor, model: KVModel, batch: Batch, links: LaneLinks) -> tuple[Inlet, ...]:
        """Inlets of the shares that hold slots of the step's rows, in the order of ranks."""
        if model.split != "tokens":
            return tuple(links.exchange_inlets.values())
        ranks = step_ranks(step, batch.tables, model.geometry.page_tokens)
        return tuple(inlet for peer, inlet in links.exchange_inlets.items() if model.numbers[peer] in ranks)

    def _run_chunk(
        self,
        header: StepHeader,
        model: KVModel,
        lane: WorkerLane,
        batch: Batch,
        inlets: tuple[DeviceInlet, ...],
        joined: JoinedFFN | None,
    ) -> HalfStep[tuple[SampledToken, ...]]:
        plan = chunk_plan(header.num_tokens, header.step_seq, model.spec.num_layers)
        yield Wait((LaneIdle(lane.memory), *inlets), OPEN_EPOCH)
        outcome = Outcome(batch, lane)
        graphs = self._take_graphs(model)
        streams = lane.prefill_streams if graphs else None

        def is_shared() -> bool:
            return streams is not None and streams.is_shared

        libraries = {shape: Library(each, is_shared) for shape, each in graphs.items()}

        def make_half() -> ChunkHalf:
            rows = ChunkRows(batch.token_ids, batch.positions, batch.row_of_token, batch.tables)
            return ChunkHalf(
                self._kernels, model.spec, model.weights, model.frames, model.geometry, rows, plan, None, libraries
            )

        has_ended = False
        try:
            if joined is None:
                maps = [inlet.link.map() for inlet in inlets]
                crossing = ChunkCrossing(self._kernels, lane.memory, maps, plan, model.spec.hidden_size)
                kernels = kv_chunk(self._kernels, make_half, crossing, plan, batch, outcome)
            else:
                ffn = joined.chunks_of(header.model, header.lane)
                kernels = joined_chunk(self._kernels, make_half, ffn, plan, batch, outcome)
            yield from run_pieces(self._kernels, lane, inlets, plan, kernels, lambda: self._decodes_beside(lane))
            yield Wait(inlets, plan.last_epoch)
            if outcome.is_copying():
                yield Wait((outcome,), plan.last_epoch)
            has_ended = True
        finally:
            for each in graphs.values():
                each.is_taken = False
            if not has_ended:
                lane.give_up(plan.last_epoch)
        return outcome.finish()

    def _take_graphs(self, model: KVModel) -> dict[GQASpec | MLASpec, SpanGraphs]:
        """The model's span graphs for one chunk; none while another chunk of it runs."""
        free = {shape: graphs for shape, graphs in model.spans.items() if not graphs.is_taken}
        for graphs in free.values():
            graphs.is_taken = True
        return free

    def _decodes_beside(self, lane: WorkerLane) -> bool:
        now_s = time.monotonic()
        return any(other.decodes(now_s) for other in self._lanes.values() if other is not lane)

    def forget(self, sequence_ids: SequenceOf[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)
        self._frames.forget(sequence_ids)

    def remove_model(self, model: str) -> None:
        self._drop(model)
        self._sequences = {key: sequence for key, sequence in self._sequences.items() if sequence.model != model}

    def _drop(self, model: str) -> None:
        for lane in tuple(self._lanes.values()):
            lane.drop(model)
        if self._models.pop(model, None) is not None or self._shares.pop(model, None) is not None:
            self._frames.remove_model(model)

    def _consumers(self) -> dict[str, int]:
        """Bytes by what they are for, each model's weights apart."""
        models = {f"attention weights of {name}": model.num_bytes for name, model in tuple(self._models.items())}
        return {"KV cache": self._frames.num_bytes, **models}

    def memory_bytes(self) -> Mapping[str, int]:
        known = {
            "attention_weights": sum(model.num_bytes for model in tuple(self._models.values()))
            + sum(share.num_bytes for share in tuple(self._shares.values())),
            "kv_cache": self._frames.num_bytes,
            "ffn_weights": 0,
            "graphs": sum(lane.graph_bytes for lane in self._lanes.values()),
            "channels": sum(lane.channel_bytes for lane in self._lanes.values()),
        }
        mapped = 0 if self._frames.is_torch_memory else self._frames.num_bytes
        return known | remainder(self._site.device, known, mapped)

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

    def _lane(self, number: int) -> WorkerLane:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = WorkerLane(
                self._site, self._rule, self._kernels, is_host_driven=self._is_host_driven
            )
        return lane

    def _joined_by(self, peers: LaneLinks | SequenceOf[str]) -> JoinedFFN | None:
        """The FFN worker that computes for this one, where the peers are but that."""
        names = tuple(peers.inlets) if isinstance(peers, LaneLinks) else tuple(peers)
        return self._joined.get(names[0]) if len(names) == 1 else None

    def _pass(
        self,
        name: str,
        model: KVModel,
        number: int,
        links: Links,
        kind: "PassKind",
        joined: JoinedFFN | None,
        num_shares: int = 0,
    ) -> KVPass:
        """The pass over `links`: to the weights ranks, and the last `num_shares` to shares."""
        lane = self._lane(number)
        weights = links[: len(links) - num_shares]

        def make() -> KVPass:
            rows = model.rows.get((number, kind.bucket))
            if rows is None:
                rows = model.rows[number, kind.bucket] = KVRows(
                    self._kernels,
                    model.spec,
                    model.weights,
                    model.frames,
                    model.geometry,
                    kind.bucket,
                    model.max_pages,
                    self._kv_ranks.index(self._site.rank) if model.split == "tokens" else None,
                )
            crossing: Crossing
            if joined is None:
                maps = [link.map() for link in weights]
                router = None
                if model.routers is not None:
                    router = KVRouter.allocate(self._kernels, lane.memory, model.spec, model.routers, kind.bucket)
                crossing = AttentionCrossing(
                    self._kernels, lane.memory, maps, takes_words=self._has_words, router=router
                )
            else:
                ffn, hidden = joined.half_of(name, number), model.spec.hidden_size
                crossing = JoinedCrossing(self._kernels, ffn, kind.bucket, hidden, self._site.device)
            return KVPass(
                self._kernels,
                lane.memory,
                rows,
                crossing,
                samples=kind.samples,
                is_decode=kind.is_decode,
                prefetches=joined is None,  # memory is busy where the FFN runs on this GPU
                home=self._home(lane, rows, links, num_shares),
            )

        source = lane.find_pass(name, links, kind, make)
        assert isinstance(source, KVPass)
        return source

    def _home(self, lane: WorkerLane, rows: KVRows, links: Links, num_shares: int) -> TokenHome | HeadHome | None:
        half, first_peer = rows.half, len(links) - num_shares
        shares = [link.map() for link in links[first_peer:]]
        if rows.own is None:
            if not shares:
                return None
            tokens, hidden = half.normed.shape
            return HeadHome(self._kernels, lane.memory, shares, first_peer, tokens, hidden, half.normed.device)
        return TokenHome(self._kernels, lane.memory, rows.own, half.cache, shares, first_peer, len(half.token_ids))

    def _push(
        self,
        lane: WorkerLane,
        source: KVPass,
        batch: Batch,
        part: Pass,
        num_layers: int,
        sampled: SequenceOf[SampledRow],
    ) -> int:
        """Upload what changed and push the pass's record; rows that are not in use repeat the first."""
        tokens = np.arange(part.start, part.start + part.bucket)
        tokens[part.num_tokens :] = part.start
        tables = [batch.tables[row] for row in batch.row_of_token[tokens].tolist()]
        sampling = sampling_records(part.bucket)
        for row in sampled:
            fill_sampling(sampling, row.token - part.start, batch.sampling_row(row))
        self._set_tables(lane, source, tables, batch.positions[tokens])
        return lane.memory.push(
            part.base, num_layers, part.bucket, batch.token_ids[tokens], batch.positions[tokens], sampling
        )

    def _set_tables(self, lane: WorkerLane, source: KVPass, tables: list[IntArray], positions: IntArray) -> None:
        if not source.rows.are_set(tables):
            with torch.cuda.stream(lane.stream):
                source.rows.set(tables, positions)


@dataclass(frozen=True, slots=True)
class Way:
    """What a step runs on: its lane's inlets are the weights ranks', then those of `num_shares` other KV ranks."""

    model: KVModel
    lane: WorkerLane
    inlets: tuple[DeviceInlet, ...]
    num_shares: int
    joined: JoinedFFN | None


@dataclass(frozen=True, slots=True)
class PassKind:
    """Which pass of a model: rows, whether any of them is sampled, whether they belong to different sequences."""

    bucket: int
    samples: bool
    is_decode: bool

    def row_numbers(self, used: int) -> list[int]:
        """Which row of a step each row of the pass holds; those that are not in use repeat the first."""
        return [row if row < used else 0 for row in range(self.bucket)]


def links_of(inlets: tuple[DeviceInlet, ...]) -> Links:
    return tuple(inlet.link for inlet in inlets)


def _cut(
    spec: ModelSpec, layers: SequenceOf[Mapping[str, torch.Tensor]], index: int, num_ranks: int
) -> list[dict[str, torch.Tensor]]:
    """The layers with one rank's heads alone."""
    cut = []
    for layer, tensors in zip(spec.layers, layers, strict=True):
        assert isinstance(layer.attention, GQASpec), "latent attention has no KV heads to cut"
        cut.append(cut_heads(tensors, layer.attention, index, num_ranks))
    return cut
