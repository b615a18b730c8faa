"""Host frames of a KV rank on a GPU: pinned memory where pages lie that its pool gave up (`kv_pool/host_tier.py`).

Copies go on beside all steps but those that bring frames which are being copied: a page that is stowed is read only,
and frames that one is brought back into are nobody's until a step brings them.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from crosspool.backends.base import Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH, Site
from crosspool.backends.cuda.device.driver import CudaError
from crosspool.backends.cuda.kv_frames.copy_engine import CopyEngine, DeviceCopyEngine
from crosspool.backends.cuda.kv_frames.copy_order import NONE, CopyBatch, CopyOrder
from crosspool.backends.cuda.prefill_rank.host_blob import HUGE_PAGE_BYTES, HostBlob
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import StepDescriptor
from crosspool.units import GiB, MiB

MAX_ENQUEUED = 2
"""Batches of one direction that the device has at a time: a millisecond each, while others wait here."""


PART_BYTES = 256 * MiB
"""Of host memory, pinned at a time by one of several threads."""


class HostFrames:
    """Implements `cluster.worker.CopiesFrames` beside an arena."""

    def __init__(
        self,
        arena: torch.Tensor,
        host: Any,
        base: int,
        num_frames: int,
        first_frame: int,
        engines: tuple[CopyEngine, CopyEngine],
    ) -> None:
        """arena: (frames, frame_bytes) uint8; first_frame: number of its frame 0. host: what keeps the `num_frames` of
        host memory at address `base`, which the engines reach: one for what is brought back, one for what is stowed."""
        self._arena, self._host, self._base, self._engines = arena, host, base, engines
        self._first_frame, self._frame_bytes = first_frame, arena.shape[1]
        self.num_bytes = num_frames * self._frame_bytes
        self._order = CopyOrder()
        self._passed_over = NONE  # batches with frames of steps in which this rank had no part
        self._enqueued: tuple[deque[tuple[CopyBatch, Callable[[], bool]]], ...] = (deque(), deque())
        self._may_bring_back: Callable[[], bool] = lambda: True

    def bring_back_once(self, is_clear: Callable[[], bool]) -> None:
        """Fill no frame before `is_clear()`: passes that were given up may still write to frames of theirs."""
        self._may_bring_back = is_clear

    def copy(self, copies: Sequence[FrameCopy]) -> None:
        """Begin with them; whoever waits for one, or asks whether there is one to wait for, has the rest follow.

        Raises CudaError.
        """
        for each in copies:
            self._order.add(each)
        self._go_on()

    def before(self, step: StepDescriptor, *, is_share: bool = False) -> Wait | None:
        """What the step has to wait for: copies under way of frames that it brings. None, as a rule.

        is_share: this rank does not lead the step; then also of frames that came with steps in which it had no part.
        """
        if not self.num_under_way:
            self._passed_over = NONE
            return None
        self._passed_over = self._order.unfinished(self._passed_over)
        numbers = self._order.touching(_brought(step)) | (self._passed_over if is_share else NONE)
        return Wait((_CopiesEnded(self, numbers),), OPEN_EPOCH) if numbers else None

    def pass_over(self, step: StepDescriptor) -> None:
        """This rank has no part in a step that it does not lead: later ones wait for copies of what it brings here."""
        if self.num_under_way:
            self._passed_over |= self._order.touching(_brought(step))

    @property
    def num_under_way(self) -> int:
        """Batches of copies that have not ended."""
        if self._order.num_unfinished:
            self._go_on()
        return self._order.num_unfinished

    def have_ended(self, numbers: frozenset[int]) -> bool:
        """Whether these batches have."""
        self._go_on()
        return self._order.have_ended(numbers)

    def _go_on(self) -> None:
        """Take note of batches that have ended, and enqueue one more of each direction if there is room."""
        for enqueued in self._enqueued:
            while enqueued and enqueued[0][1]():
                self._order.ended(enqueued.popleft()[0])
        for is_stowed, enqueued in enumerate(self._enqueued):
            may_begin = len(enqueued) < MAX_ENQUEUED and (is_stowed or self._may_bring_back())
            batch = self._order.next(is_stowed=bool(is_stowed)) if may_begin else None
            if batch is not None:
                enqueued.append((batch, self._enqueue(batch)))

    def _enqueue(self, batch: CopyBatch) -> Callable[[], bool]:
        pairs = [pair for each in batch.copies for pair in zip(each.frames, each.host_frames, strict=True)]
        frames, host_frames = np.array(pairs, dtype=np.uint64).T
        on_device = np.uint64(self._arena.data_ptr()) + (frames - self._first_frame) * self._frame_bytes
        on_host = np.uint64(self._base) + host_frames * self._frame_bytes
        targets, sources = (on_host, on_device) if batch.is_stowed else (on_device, on_host)
        return self._engines[batch.is_stowed].enqueue(targets, sources, self._frame_bytes)


def _brought(step: StepDescriptor) -> Iterator[int]:
    return (frame for row in step.rows for page in row.new_pages for frame in page)


class _CopiesEnded:
    """Arrived once copies have ended."""

    def __init__(self, frames: HostFrames, numbers: frozenset[int]) -> None:
        self._frames, self._numbers = frames, numbers

    def arrived(self, epoch: int) -> bool:
        return self._frames.have_ended(self._numbers)


def make_host_frames(site: Site, arena: torch.Tensor, num_frames: int, first_frame: int) -> HostFrames:
    """`num_frames` of pinned memory beside the rank's arena. Raises ValueError where there is not so much."""
    try:
        host = host_memory(site, num_frames, arena.shape[1])
    except (OSError, MemoryError, CudaError) as failure:
        raise ValueError(
            f"{site.rank}: host_pool_bytes asks for {num_frames * arena.shape[1] / GiB:.1f} GiB of pinned memory: "
            f"{failure}; lower it"
        ) from None
    engines = DeviceCopyEngine(site.driver, site.device), DeviceCopyEngine(site.driver, site.device)
    frames = HostFrames(arena, host, host.memory.data_ptr(), num_frames, first_frame, engines)
    weakref.finalize(frames, host.close).atexit = False  # while it is pinned nobody else may have its addresses
    return frames


def host_memory(site: Site, num_frames: int, frame_bytes: int) -> HostBlob:
    """Frames one after another, pinned in parts that begin with whole frames."""
    step = HUGE_PAGE_BYTES // math.gcd(frame_bytes, HUGE_PAGE_BYTES)  # frames that end where a huge page does
    part = step * max(1, PART_BYTES // (step * frame_bytes))
    parts: dict[Hashable, int] = {
        first: min(part, num_frames - first) * frame_bytes for first in range(0, num_frames, part)
    }
    return HostBlob(site, parts)
