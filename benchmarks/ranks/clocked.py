"""Ranks whose devices are clocks; records and commits are real."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.ranks.hosted import RanksOfALane
from benchmarks.ranks.placed import PAGE_TOKENS, placed
from crosspool.backends.base import HalfStep, Inlet, LaneLinks, NewLink, Outlet, Progress, Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH
from crosspool.backends.cuda.steps.batch import Batch
from crosspool.backends.cuda.steps.decode_run import places, push_run, read_end, read_run
from crosspool.backends.cuda.steps.lane import LaneIdle
from crosspool.backends.cuda.steps.lane_memory import DONE, LaneMemory, WaitRule
from crosspool.backends.cuda.steps.records import RunPlace
from crosspool.backends.sequences.sequence import Sequence
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.rank_halves import header_of
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.worker import RankWorker
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepHeader, epoch, run_over

LAYERS = 48


class ClockedLane(LaneMemory):
    """A lane whose device ends a step every `step_s` seconds, as long as it has one."""

    def __init__(self, step_s: float) -> None:
        super().__init__(torch.device("cpu"), WaitRule())
        self._clocked_s = step_s
        self._ends: deque[tuple[float, int]] = deque()  # when, and the epoch
        self._until_s = 0.0

    def go(self, header: StepHeader) -> None:
        """A run is handed over; it begins at once, or behind the one that is under way."""
        self._until_s = max(self._until_s, time.monotonic())
        for base, _ in places(header, LAYERS):
            self._until_s += self._clocked_s
            self._ends.append((self._until_s, base + LAYERS))

    @property
    def done_epoch(self) -> int:
        now_s = time.monotonic()
        while self._ends and self._ends[0][0] <= now_s:
            self._host_words[DONE] = self._ends.popleft()[1]
        return int(self._host_words[DONE])


class ClockedInlet:
    """Arrived once the lane's device has come so far (as `DeviceInlet`)."""

    def __init__(self, lane: ClockedLane) -> None:
        self._lane = lane

    def arrived(self, epoch: int) -> bool:
        return epoch == OPEN_EPOCH or self._lane.done_epoch >= epoch

    def take(self, layer: int, num_tokens: int, width: int) -> Any:
        raise TypeError("it carries no rows")


class ClockedWorker:
    """Either half of a run, on a lane of its own."""

    def __init__(self, step_s: float) -> None:
        self.lane = ClockedLane(step_s)
        self.sequences: dict[int, Sequence] = {}
        self._ahead = 0  # the step that was found fit to be handed over while the one before is under way

    def may_begin_ahead(self, work: StepDescriptor | StepHeader) -> bool:
        """As the CUDA workers, of a step that nothing makes wait but the one before."""
        if self.lane.nears_end:
            self._ahead = header_of(work).step_seq
        return self.lane.nears_end

    def takes_ahead(self, header: StepHeader) -> bool:
        return header.step_seq == self._ahead

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None: ...

    def remove_model(self, model: str) -> None: ...

    def forget(self, sequence_ids: Any) -> None: ...

    def memory_bytes(self) -> Mapping[str, int]:
        return {}

    def open_link(self, new: NewLink) -> tuple[Outlet, Inlet]:
        return ClockedOutlet(), ClockedInlet(self.lane)

    def close_links(self, peer: str) -> None: ...


class ClockedOutlet:
    def put(self, layer: int, epoch: int, payload: Any) -> None:
        raise TypeError("kernels put rows, and there are none")


class ClockedAttention(ClockedWorker):
    batch: Batch | None = None

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[tuple[SampledToken, ...]]:
        for new in step.joining:
            self.sequences[new.sequence_id] = Sequence(new, step.header.model, 1, 1000)
        is_ahead, inlet = self.takes_ahead(step.header), ClockedInlet(self.lane)
        batch = Batch(step, self.sequences, PAGE_TOKENS, self.batch if is_ahead else None)
        self.batch = batch
        if not is_ahead:
            yield Wait((LaneIdle(self.lane), inlet), OPEN_EPOCH)
        follows = self.lane.last_epoch if is_ahead else 0
        slots = push_run(self.lane, batch, step.header, LAYERS, 1, PAGE_TOKENS)
        self.lane.go(step.header)
        if is_ahead:
            yield Wait((), OPEN_EPOCH)
        sampled = yield from read_run(self.lane, batch, step, slots, LAYERS, (inlet,), follows)  # type: ignore[arg-type]
        self.lane.nears_end = False
        return sampled


class ClockedFFN(ClockedWorker):
    def run(self, header: StepHeader, links: LaneLinks) -> HalfStep[None]:
        is_ahead, inlet = self.takes_ahead(header), ClockedInlet(self.lane)
        if not is_ahead:
            yield Wait((LaneIdle(self.lane), inlet), OPEN_EPOCH)
        over = run_over(header.step_seq, header.num_steps, LAYERS)
        place = RunPlace(over, 0, header.num_steps - 1, may_be_first=is_ahead)
        follows = self.lane.last_epoch if is_ahead else 0
        self.lane.post(epoch(header.step_seq, 0) - 1, LAYERS, 1 << 40, place, header.num_steps)
        self.lane.go(header)
        if is_ahead:
            yield Wait((), OPEN_EPOCH)
        yield from read_end(self.lane, header, LAYERS, inlet, follows)  # type: ignore[arg-type]
        self.lane.nears_end = False


def clocked_ranks(step_s: float, num_tokens: int, *, is_ahead: bool) -> RanksOfALane:
    """Room for one sequence of so many tokens."""
    attention, ffn = ClockedAttention(step_s), ClockedFFN(step_s)
    return RanksOfALane(
        workers={
            "kv0": RankWorker(attention_worker=attention, links=attention, ahead=attention if is_ahead else None),
            "w0": RankWorker(ffn_worker=ffn, links=ffn, ahead=ffn if is_ahead else None),
        },
        placement=placed("m", 64),
        capacity=64,
        region=ArrayRegion(1 << 12),
        pages=tuple((page + 1,) for page in range(num_tokens // PAGE_TOKENS + 2)),
    )
