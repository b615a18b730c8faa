"""The two ranks of one model in one thread, turned as a host turns them: real workers and loops, without an engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from benchmarks.ranks.placed import FRAME_BYTES, PAGE_TOKENS, placed
from crosspool.backends.base import Progress
from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kv_frames.frames import ArenaFrames
from crosspool.backends.cuda.kv_rank.kv_worker import CudaAttentionWorker
from crosspool.backends.cuda.loading.ffn_weights import FFNLayerWeights
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.steps.lane import enter, on_device
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule
from crosspool.backends.cuda.weights_rank.ffn_passes import FFNWay
from crosspool.backends.cuda.weights_rank.ffn_worker import CudaFFNWorker
from crosspool.cluster import messages
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.channel import link_bytes
from crosspool.cluster.rank_loop import RankLoop, RankSurroundings
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.worker import RankWorker
from crosspool.core import SamplingParams
from crosspool.kv_pool.geometry import PageGeometry, page_geometry
from crosspool.models.spec import ModelSpec
from crosspool.pools_config import Control
from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepRow
from crosspool.units import ceil_div

MAX_ROWS = 32
STEP_DEADLINE_S = 5.0
RANKS = ("kv0", "w0")


class ReadyKV(CudaAttentionWorker):
    """Loads what it was given."""

    ready: tuple[ModelSpec, AttentionWeights]

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        self.add_weights(placement, *self.ready, 0)

    def lane_memory(self, lane: int) -> LaneMemory:
        return self._lanes[lane].memory


class ReadyFFN(CudaFFNWorker):
    """Loads what it was given."""

    ready: tuple[ModelSpec, Sequence[FFNLayerWeights]]

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        self.add_weights(placement.name, *self.ready)
        if self._resident is not None:  # later the server would have to leave for that, and may wait for this thread
            for number, lane, links in self._lanes.open_to([placement.kv_rank]):
                way = FFNWay(placement.name, self._models[placement.name], number, lane, links)
                self._resident.prepare(way, (1,))


@dataclass
class Sequence_:
    """One sequence of a lane: where it is, and what it was given."""

    sequence_id: int
    context: int
    first_frame: int
    stop_ids: tuple[int, ...] = ()
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)


class DrivenRanks:
    """One KV rank and one weights rank, each with kernels and a device, which may be one and the same."""

    def __init__(
        self,
        kernels: tuple[Launcher, Launcher],
        devices: tuple[torch.device, torch.device],
        spec: ModelSpec,
        attention: AttentionWeights,
        layers: Sequence[FFNLayerWeights],
        arena: torch.Tensor,
        control: Control,
        num_lanes: int = 2,
        *,
        ahead: Sequence[str] = RANKS,
    ) -> None:
        """ahead: ranks whose devices get a step while they are at the lane's one before."""
        numbers = {rank: device.index or 0 for rank, device in zip(("kv0", "w0"), devices, strict=True)}
        rule = WaitRule(deadline_s=0.8 * STEP_DEADLINE_S)
        sites = [Site(rank, device, Driver(rank), numbers, None) for rank, device in zip(numbers, devices, strict=True)]
        kv = ReadyKV(
            sites[0], kernels[0], rule, ArenaFrames(arena), is_host_driven=control == "host", goes_ahead="kv0" in ahead
        )
        ffn = ReadyFFN(sites[1], kernels[1], rule, control=control, goes_ahead="w0" in ahead)
        kv.ready, ffn.ready = (spec, attention), (spec, layers)
        self._kv = kv
        self.geometry: PageGeometry = page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES)
        self._devices = dict(zip(("kv0", "w0"), devices, strict=True))
        self._is_one = devices[0] == devices[1]
        enter(devices[0])
        self.ended: deque[messages.FromRank] = deque()
        self._loops = [
            self._loop("kv0", RankWorker(attention_worker=kv, links=kv, ahead=kv if "kv0" in ahead else None))
        ]
        self._loops.append(
            self._loop("w0", RankWorker(ffn_worker=ffn, links=ffn, ahead=ffn if "w0" in ahead else None))
        )
        placement = placed("model", spec.hidden_size)
        capacity = 2 * MAX_ROWS * spec.hidden_size
        for lane in range(num_lanes):
            region = ArrayRegion(link_bytes(capacity))
            for loop, peer in zip(self._loops, ("w0", "kv0"), strict=True):
                self._handle(loop, messages.OpenChannels(lane, peer, capacity, region))
        for loop in self._loops:
            self._handle(loop, messages.AddModel(placement, 1))
        self._seq = [0] * num_lanes
        self._next_id = 1
        while any(loop.is_busy for loop in self._loops):
            self.turn()

    def _loop(self, name: str, worker: RankWorker) -> RankLoop:
        around = RankSurroundings(
            emit=self.ended.append,
            ring=lambda peer: lambda: None,
            wake=lambda: None,
            clock=time.monotonic,
            order=ORDER_POLICIES["priority"],
            step_deadline_s=STEP_DEADLINE_S,
            start=lambda run, name: run(),
        )
        return RankLoop(name, worker, around)

    def _handle(self, loop: RankLoop, message: messages.ToRank) -> None:
        if self._is_one:
            loop.handle(message)
            return
        with self._device_of(loop):
            loop.handle(message)

    def _advance(self, loop: RankLoop) -> bool:
        if self._is_one:
            return loop.advance()
        with self._device_of(loop):
            return loop.advance()

    def _device_of(self, loop: RankLoop) -> AbstractContextManager[None]:
        """Makes a rank's device the current one, which is its thread's own where ranks have threads."""
        return on_device(self._devices[loop.name])

    def turn(self) -> None:
        """Run what is ready on either rank; nap where both may, as a host does."""
        if not any([self._advance(loop) for loop in self._loops]):
            nap_s = min(loop.nap_s() for loop in self._loops)
            if nap_s > 0:
                time.sleep(min(nap_s, 0.05))

    @property
    def may_nap(self) -> bool:
        """Whether all that the ranks wait for goes on without a host."""
        return min(loop.nap_s() for loop in self._loops) > 0

    def step_ms(self, lane: int) -> float:
        """How long a step of the lane's runs takes by itself, as its host has learned: no gap between runs is in it."""
        return 1e3 * self._kv.lane_memory(lane).pace_of("model", 1).step_s

    def sequence(self, context: int, slot: int = 0, stop_ids: tuple[int, ...] = ()) -> Sequence_:
        """A sequence whose cache holds `context` - 1 tokens of whatever lies in the arena; slots must not overlap."""
        self._next_id += 1
        pages = ceil_div(context + PAGE_TOKENS * 4, PAGE_TOKENS)
        return Sequence_(self._next_id, context, 1 + slot * pages * self.geometry.frames_per_page, stop_ids)

    def begin(self, lane: int, sequence: Sequence_) -> StepDescriptor:
        """The step of its last prompt token, which gives its first own token."""
        width, context = self.geometry.frames_per_page, sequence.context
        pages = ceil_div(context + PAGE_TOKENS * 4, PAGE_TOKENS)
        frames = range(sequence.first_frame, sequence.first_frame + pages * width)
        prompt = tuple(position % 500 + 1 for position in range(context))
        row = StepRow(
            sequence_id=sequence.sequence_id,
            token_ids=prompt[-1:],
            num_cached_tokens=context - 1,
            num_new_tokens=1,
            new_pages=tuple(tuple(frames[page * width : (page + 1) * width]) for page in range(pages)),
        )
        sampling = SamplingParams(max_tokens=1000, temperature=0.0, stop_token_ids=sequence.stop_ids)
        new = NewSequence(
            sequence_id=sequence.sequence_id, prompt_token_ids=prompt, output_token_ids=(), sampling=sampling
        )
        sequence.num_cached = context
        return StepDescriptor(header=self._header(lane, "prefill", 1), rows=(row,), joining=(new,))

    def decode(self, lane: int, sequences: Sequence[Sequence_], num_steps: int) -> StepDescriptor:
        """The next `num_steps` steps, behind all that were handed out, of a row for each sequence."""
        rows = [
            StepRow(
                sequence_id=sequence.sequence_id,
                token_ids=None,
                num_cached_tokens=sequence.num_cached,
                num_new_tokens=1,
            )
            for sequence in sequences
        ]
        for sequence in sequences:
            sequence.num_cached += num_steps
        return StepDescriptor(header=self._header(lane, "decode", num_steps, len(rows)), rows=tuple(rows))

    def _header(self, lane: int, phase: str, num_steps: int, num_tokens: int = 1) -> StepHeader:
        self._seq[lane] += 1
        assert phase in ("prefill", "decode")
        return StepHeader(
            lane=lane,
            model="model",
            step_seq=self._seq[lane],
            phase="prefill" if phase == "prefill" else "decode",
            num_tokens=num_tokens,
            num_steps=num_steps,
        )

    def submit(self, step: StepDescriptor, behind: int = 0) -> None:
        self._handle(self._loops[1], messages.Step(step.header, behind))
        self._handle(self._loops[0], messages.Step(step, behind))

    def submit_timed(self, step: StepDescriptor) -> dict[str, float]:
        """The same, up to where both ranks wait for their devices; seconds of processor time of each."""
        used = {}
        for loop in reversed(self._loops):
            begin_s = time.thread_time()
            self._handle(loop, messages.Step(step if loop.name == "kv0" else step.header, 0))
            while self._advance(loop):
                pass
            used[loop.name] = time.thread_time() - begin_s
        return used

    def has_ended(self) -> bool:
        """Whether both ranks would find the end of what they are at."""
        return all(loop.has_work() or not loop.is_busy for loop in self._loops)

    def turn_timed(self) -> dict[str, float]:
        """Run what is ready on either rank until nothing is; seconds of processor time of each."""
        used = {}
        for loop in self._loops:
            begin_s = time.thread_time()
            while self._advance(loop):
                pass
            used[loop.name] = time.thread_time() - begin_s
        return used

    def take(self) -> list[tuple[int, int, bool]]:
        """(lane, token, whether its descriptor has ended) of what was told since. Raises RuntimeError for a failure."""
        found = []
        while self.ended:
            match self.ended.popleft():
                case messages.StepTold(lane, _, steps):
                    found += [(lane, sampled[0].token_id, False) for sampled in steps]
                case messages.StepFinished(result, told):
                    found += [(result.lane, sampled[0].token_id, False) for sampled in told]
                    found.append((result.lane, result.sampled[0].token_id, True))
                case messages.StepEnded(error=error):
                    raise RuntimeError(error)
                case _:
                    pass
        return found

    def generate(self, lanes: Sequence[tuple[int, Sequence_]], count: int, num_steps: int) -> list[float]:
        """`count` tokens of each lane's sequence, two descriptors at a time as the engine hands them out.

        Returns the moments at which tokens came, of all lanes. A run that ends early ends its lane.
        """
        by_lane, moments = dict(lanes), []
        left, flying = dict.fromkeys(by_lane, count), dict.fromkeys(by_lane, 0)
        for lane, sequence in lanes:
            self.submit(self.begin(lane, sequence))
            flying[lane], left[lane] = 1, count - 1
        while any(flying.values()):
            for lane, sequence in lanes:
                if left[lane] > 0 and flying[lane] < 2:
                    steps = min(num_steps, left[lane])
                    behind = self._seq[lane] if flying[lane] else 0
                    self.submit(self.decode(lane, [sequence], steps), behind)
                    flying[lane] += 1
                    left[lane] -= steps
            self.turn()
            for lane, token, has_ended in self.take():
                moments.append(time.perf_counter())
                by_lane[lane].tokens.append(token)
                flying[lane] -= has_ended
        return moments
