"""The KV pool's CUDA worker: takes models, links and steps, and gives each step to what runs it.

A step is one graph replay per pass, then sampling from what the device left (`kv_step.py`). A run of steps is in
`kv_run.py`, a chunk of prompts in `kv_chunk_run.py` or, with a prefill rank, `handed_home.py`, the part of a step that
another KV rank leads in `kv_share.py`.
"""

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from crosspool.backends.base import HalfStep, Inlet, LaneLinks, NewLink, Outlet, Progress
from crosspool.backends.cuda.channels.link import DeviceOutlet, Site
from crosspool.backends.cuda.chunks.chunk_support import runs_in_pieces
from crosspool.backends.cuda.device.device_memory import naming_consumers, remainder
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.joined import JoinedFFN, JoinedInlet, JoinedLink
from crosspool.backends.cuda.kv_frames.frames import KVFrames
from crosspool.backends.cuda.kv_frames.host_frames import HostFrames
from crosspool.backends.cuda.kv_rank.handed_home import run_handed
from crosspool.backends.cuda.kv_rank.kv_ahead import KVAhead
from crosspool.backends.cuda.kv_rank.kv_chunk_run import run_kv_chunk
from crosspool.backends.cuda.kv_rank.kv_models import KVModel, KVModels
from crosspool.backends.cuda.kv_rank.kv_passes import KVPasses, KVWay
from crosspool.backends.cuda.kv_rank.kv_prepare import prepare_chunks, prepare_passes
from crosspool.backends.cuda.kv_rank.kv_router import Routers
from crosspool.backends.cuda.kv_rank.kv_run import run_by_device, run_by_host
from crosspool.backends.cuda.kv_rank.kv_share import ShareRows, answers, step_ranks
from crosspool.backends.cuda.kv_rank.kv_step import run_step
from crosspool.backends.cuda.loading.kv_loading import check_placement, is_share, load_kv
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.given_up import GivenUp
from crosspool.backends.cuda.steps.lane import device_inlets, enter, finish
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.backends.cuda.steps.lanes import WorkerLanes
from crosspool.backends.sequences.page_reader import PageReader
from crosspool.backends.sequences.sequence import Sequence
from crosspool.cluster.base import ModelPlacement
from crosspool.core import SampledToken
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.directory import read_model_dir
from crosspool.models.spec import ModelSpec
from crosspool.scheduler.step import StepDescriptor, StepHeader

logger = logging.getLogger(__name__)


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
        goes_ahead: bool = False,
        host_frames: HostFrames | None = None,
        run_lanes: int = 0,
    ) -> None:
        """first_frame: number of this rank's frame 0 where there are several KV ranks, `kv_ranks` in their order.

        host_frames: beside `frames`, for pages that the pool gives up. run_lanes: how many lanes, from the first on,
        will take runs of steps: loads capture their loops.
        """
        self._site, self._kernels, self._frames, self._is_host_driven = site, kernels, frames, is_host_driven
        self.host_frames = host_frames
        finish(site.device)
        self._models = KVModels(site, frames, first_frame, kv_ranks)
        self._lanes = WorkerLanes(site, rule, kernels, is_host_driven=is_host_driven, goes_ahead=goes_ahead)
        self._passes = KVPasses(site, kernels, is_host_driven=is_host_driven)
        self._run_lanes = run_lanes
        self._sequences: dict[int, Sequence] = {}
        self._joined: dict[str, JoinedFFN] = {}
        self._given_up = GivenUp()
        if host_frames is not None:
            host_frames.bring_back_once(lambda: self._given_up.have_ended)
        self._ahead = KVAhead(site.rank, self._models, self._lanes, self._sequences)

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        site = self._site
        enter(site.device)
        directory = read_model_dir(placement.directory)
        check_placement(placement, directory.spec)
        takes_part = is_share(placement, site.rank)
        if takes_part and placement.kv_split != "heads":
            self.add_share(placement, directory.spec)
            return
        wanted = f"the attention weights of {placement.name}"
        with naming_consumers(site.rank, site.device, wanted, self._models.consumers):
            loaded = load_kv(directory, placement, site, progress)
        if takes_part:
            self.add_share(placement, loaded.spec, loaded.weights, loaded.num_bytes)
            return
        self.add_weights(placement, loaded.spec, loaded.weights, loaded.num_bytes, loaded.routers)
        if site.device.type == "cuda":
            try:
                self._prepare(placement, progress)
            except BaseException:
                self._drop(placement.name)
                raise

    def add_weights(
        self,
        placement: ModelPlacement,
        spec: ModelSpec,
        weights: AttentionWeights,
        num_bytes: int,
        routers: Routers | None = None,
    ) -> None:
        """The same with weights that are on the device already. routers: where experts are chosen here."""
        self._models.add_led(placement, spec, weights, num_bytes, routers)

    def add_share(
        self, placement: ModelPlacement, spec: ModelSpec, weights: AttentionWeights | None = None, num_bytes: int = 0
    ) -> None:
        """Take part in the steps of a model whose home is another KV rank. weights: of this rank's heads, where cut."""
        self._models.add_share(placement, spec, weights, num_bytes)

    def _prepare(self, placement: ModelPlacement, progress: Progress) -> None:
        """Load what chunks need, and capture the model's passes for every lane that is open."""
        begin_s, name, model = time.monotonic(), placement.name, self._models.led(placement.name)
        prepare_chunks(self._kernels, self._site, self._lanes, model)
        joined = self._joined_by(placement.weights_ranks)

        def tell() -> None:
            progress(model.num_bytes, model.num_bytes)  # a load that was given up ends here

        ranks = placement.weights_ranks
        prepare_passes(self._passes, self._site, self._lanes, name, model, ranks, joined, tell, self._run_lanes)
        logger.info("%s: passes of %s are ready after %.2f s", self._site.rank, name, time.monotonic() - begin_s)

    def join(self, rank: str, ffn: JoinedFFN) -> None:
        """Run the whole of models whose only weights rank is `rank`, which shares this process and GPU."""
        self._joined[rank] = ffn

    def open_link(self, new: NewLink) -> tuple[Outlet, Inlet]:
        """This rank's ends of the lane's channels with a weights rank, a prefill rank or another KV rank."""
        lane = self._lanes[new.lane]
        if new.peer in self._joined:
            link = lane.links[new.peer] = JoinedLink()
            return DeviceOutlet(link, new.ring), JoinedInlet(lane.memory, link)
        return lane.open_link(new, is_kv=not new.is_far)

    def close_links(self, peer: str) -> None:
        self._lanes.close_links(peer)

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        placed, memory = self._frames.begin(step), self._lanes[step.header.lane].memory
        try:
            if self.host_frames is not None or not self._given_up.have_ended:
                yield from self._settled(step)
            return (yield from self._run(placed, links))
        except BaseException:
            self._given_up.note(memory)
            raise
        finally:
            self._frames.end(step, memory)

    def _run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        header, found, kernels = step.header, self._passes, self._kernels
        model, lane = self._models.led(header.model), self._lanes[header.lane]
        self._take_in(step, model.spec, model.geometry, model.pages)

        ahead = self._ahead.take(step)
        batch = ahead or Batch(step, self._sequences, model.geometry.page_tokens)
        shares = self._taking_part(step, model, batch, links)
        inlets = device_inlets((*links.inlets.values(), *shares))
        ends = tuple([inlet.link for inlet in inlets])

        if header.prefill_rank is not None:
            beside = self._lanes.neighbours_of(lane, is_fixed=not self._site.is_alone)
            return (yield from run_handed(kernels, header, model, lane, inlets[0], batch, beside))
        way = KVWay(header.model, model, header.lane, lane, ends, len(shares), self._joined_by(tuple(links.inlets)))
        if model.split == "one" and runs_in_pieces(header, model.spec):
            beside = self._lanes.neighbours_of(lane, is_fixed=not self._site.is_alone and way.joined is None)
            return (yield from run_kv_chunk(kernels, header, way, inlets, batch, beside))
        if ahead is None and (busy := lane.before_begin(inlets)) is not None:
            yield busy
        is_ahead, goes_by_itself = ahead is not None, lane.stream is not None and not self._is_host_driven
        try:
            if goes_by_itself and way.joined is None and not shares:
                self._ahead.begins(header.lane, batch, is_run=step.num_steps > 1)
            if step.num_steps == 1:
                return (yield from run_step(found, header, way, inlets, batch, is_ahead=is_ahead))
            if goes_by_itself and batch.runs_on_device:
                return (yield from run_by_device(found, step, way, inlets, batch, is_ahead=is_ahead))
        finally:
            lane.memory.nears_end = False  # what comes next has to be on the device first
            self._ahead.ended(header.lane, batch)
        return (yield from run_by_host(found, kernels, step, way, inlets, batch, self._sequences))

    def may_begin_ahead(self, work: StepDescriptor | StepHeader) -> bool:
        """Whether a step may be handed to the device now (`cluster.worker.BeginsAhead`)."""
        return isinstance(work, StepDescriptor) and self._given_up.have_ended and self._ahead.is_fit(work)

    def run_share(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[None] | None:
        """The part of this rank in a step that another KV rank leads (`backends.base.ShareWorker`)."""
        share = self._models.share(step.header.model)
        self._take_in(step, share.spec, share.geometry, share.pages)
        rows = ShareRows(step, self._sequences, share.geometry.page_tokens)
        if not share.takes_part(rows):
            if self.host_frames is not None:
                self.host_frames.pass_over(step)
            rows.commit()
            return None
        (inlet,) = device_inlets(links.exchange_inlets.values())
        return self._answered(step, answers(self._kernels, share, step, rows, self._lanes[step.header.lane], inlet))

    def _answered(self, step: StepDescriptor, half: HalfStep[None]) -> HalfStep[None]:
        try:
            yield from self._settled(step, is_share=True)
            yield from half
        except BaseException:
            self._given_up.note(self._lanes[step.header.lane].memory)
            raise

    def _settled(self, step: StepDescriptor, *, is_share: bool = False) -> HalfStep[None]:
        """Wait until nobody writes to the frames that the step brings."""
        given_up = self._given_up.before(step)
        if given_up is not None:
            yield given_up
        copies = None if self.host_frames is None else self.host_frames.before(step, is_share=is_share)
        if copies is not None:
            yield copies

    def _take_in(self, step: StepDescriptor, spec: ModelSpec, geometry: PageGeometry, pages: PageReader) -> None:
        """Know the sequences that join with the step."""
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

    def _joined_by(self, weights_ranks: SequenceOf[str]) -> JoinedFFN | None:
        """The FFN worker that computes for this one, where the weights ranks are but that."""
        return self._joined.get(weights_ranks[0]) if len(weights_ranks) == 1 else None

    def forget(self, sequence_ids: SequenceOf[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)
        self._frames.forget(sequence_ids)

    def remove_model(self, model: str) -> None:
        self._drop(model)
        for key in [key for key, sequence in self._sequences.items() if sequence.model == model]:
            del self._sequences[key]

    def _drop(self, model: str) -> None:
        self._lanes.drop(model)
        self._models.remove(model)

    def memory_bytes(self) -> Mapping[str, int]:
        cache_bytes = self._frames.num_bytes
        known = {
            "attention_weights": self._models.num_weight_bytes(),
            "kv_cache": cache_bytes,
            "ffn_weights": 0,
            **self._lanes.memory_bytes(),
        }
        known |= remainder(
            self._site.rank, self._site.device, known, 0 if self._frames.is_torch_memory else cache_bytes
        )
        return known if self.host_frames is None else known | {"host_kv_cache": self.host_frames.num_bytes}
