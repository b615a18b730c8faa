"""Host frames of a KV rank on a GPU: pinned memory where pages lie that its pool gave up (`kv_pool/host_tier.py`).

Copies go on beside all steps but those that bring frames which are being copied: a page that is stowed is read only,
and frames that one is brought back into are nobody's until a step brings them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from crosspool.backends.base import Wait
from crosspool.backends.cuda.copy_engine import CopyEngine, DeviceCopyEngine
from crosspool.backends.cuda.launch import CudaError
from crosspool.backends.cuda.link import OPEN_EPOCH, Site
from crosspool.backends.cuda.pinned_memory import pinned_memory
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import StepDescriptor
from crosspool.units import GiB

MAX_COPIES = 128
"""Frames of a batch. Enqueuing one takes a microsecond and a half of the thread that also runs decode steps."""

MAX_ENQUEUED = 2
"""Batches that the device has at a time: some five milliseconds each, while others wait here."""


@dataclass(slots=True)
class _Batch:
    """Copies that are enqueued together: their number, the pool's frames among them, and what tells of their end."""

    number: int
    copies: list[FrameCopy]
    has_ended: Callable[[], bool] | None = None  # None: not enqueued yet

    @property
    def frames(self) -> Iterator[int]:
        return (frame for each in self.copies for frame in each.frames)


class HostFrames:
    """Implements `cluster.worker.CopiesFrames` beside an arena."""

    def __init__(
        self, arena: torch.Tensor, host: Any, base: int, num_frames: int, first_frame: int, engine: CopyEngine
    ) -> None:
        """arena: (frames, frame_bytes) uint8; first_frame: number of its frame 0. host: what keeps the `num_frames` of
        host memory at address `base`, which `engine` reaches."""
        self._arena, self._host, self._base, self._engine = arena, host, base, engine
        self._first_frame, self._frame_bytes = first_frame, arena.shape[1]
        self.num_bytes = num_frames * self._frame_bytes
        self._waiting: deque[_Batch] = deque()
        self._enqueued: deque[_Batch] = deque()
        self._newest: dict[int, int] = {}  # by frame: the last batch that has it and has not ended
        self._num_batches = self._num_ended = 0

    def copy(self, copies: Sequence[FrameCopy]) -> None:
        """Begin with them; whoever waits for one, or asks whether there is one to wait for, has the rest follow.

        Raises CudaError.
        """
        for each in batches(copies):
            self._num_batches += 1
            batch = _Batch(self._num_batches, each)
            self._waiting.append(batch)
            self._newest.update(dict.fromkeys(batch.frames, batch.number))
        self._go_on()

    def before(self, step: StepDescriptor) -> Wait | None:
        """What the step has to wait for: copies under way of frames that it brings. None, as a rule."""
        self._go_on()
        if not self._newest:
            return None
        brought = (frame for row in step.rows for page in row.new_pages for frame in page)
        number = max((self._newest.get(frame, 0) for frame in brought), default=0)
        return Wait((_CopiesEnded(self, number),), OPEN_EPOCH) if number else None

    @property
    def num_under_way(self) -> int:
        """Batches of copies that have not ended."""
        self._go_on()
        return len(self._enqueued) + len(self._waiting)

    def have_ended(self, number: int) -> bool:
        """Whether all batches up to this one have."""
        self._go_on()
        return self._num_ended >= number

    def _go_on(self) -> None:
        """Take note of batches that have ended, and enqueue one more if there is room."""
        while self._enqueued and (has_ended := self._enqueued[0].has_ended) is not None and has_ended():
            batch = self._enqueued.popleft()
            self._num_ended = batch.number
            for frame in batch.frames:
                if self._newest.get(frame) == batch.number:
                    del self._newest[frame]
        if self._waiting and len(self._enqueued) < MAX_ENQUEUED:
            batch = self._waiting.popleft()
            batch.has_ended = self._enqueue(batch.copies)
            self._enqueued.append(batch)

    def _enqueue(self, copies: list[FrameCopy]) -> Callable[[], bool]:
        pairs = [
            (frame, host_frame, each.is_stowed)
            for each in copies
            for frame, host_frame in zip(each.frames, each.host_frames, strict=True)
        ]
        numbers = np.array(pairs, dtype=np.uint64).T
        on_device = np.uint64(self._arena.data_ptr()) + (numbers[0] - self._first_frame) * self._frame_bytes
        on_host = np.uint64(self._base) + numbers[1] * self._frame_bytes
        is_stowed = numbers[2] > 0
        targets, sources = np.where(is_stowed, on_host, on_device), np.where(is_stowed, on_device, on_host)
        return self._engine.enqueue(targets, sources, self._frame_bytes)


class _CopiesEnded:
    """An inlet that has arrived once copies have ended."""

    def __init__(self, frames: HostFrames, number: int) -> None:
        self._frames, self._number = frames, number

    def arrived(self, epoch: int) -> bool:
        return self._frames.have_ended(self._number)

    def take(self, layer: int, num_tokens: int, width: int) -> Any:
        raise TypeError("it carries no rows")


def batches(copies: Sequence[FrameCopy]) -> Iterator[list[FrameCopy]]:
    """The copies in order, cut so that no two of a batch touch the same frame, on either side, and none is long."""
    batch: list[FrameCopy] = []
    frames: set[int] = set()
    host_frames: set[int] = set()
    for each in copies:
        is_apart = frames.isdisjoint(each.frames) and host_frames.isdisjoint(each.host_frames)
        if batch and not (is_apart and len(frames) + len(each.frames) <= MAX_COPIES):
            yield batch
            batch, frames, host_frames = [], set(), set()
        batch.append(each)
        frames.update(each.frames)
        host_frames.update(each.host_frames)
    if batch:
        yield batch


def make_host_frames(site: Site, arena: torch.Tensor, num_frames: int, first_frame: int) -> HostFrames:
    """`num_frames` of pinned memory beside the rank's arena. Raises ValueError where there is not so much."""
    num_bytes = num_frames * arena.shape[1]
    try:
        host = pinned_memory(site.driver, num_bytes)
    except (OSError, CudaError) as failure:
        raise ValueError(
            f"{site.rank}: host_pool_bytes asks for {num_bytes / GiB:.1f} GiB of pinned memory: {failure}; lower it"
        ) from None
    return HostFrames(arena, host, host.base, num_frames, first_frame, DeviceCopyEngine(site.driver, site.device))
