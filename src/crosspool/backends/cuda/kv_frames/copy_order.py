"""CopyOrder: which copies between a pool and host memory go out together, and what each of them comes after. Pure.

Pages that are stowed and pages that are brought back go by ways of their own, so that a decode step which needs the
frame of a page that is being stowed does not wait for the return of a long conversation. What touches the same frame,
on either side, keeps its order.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from crosspool.kv_pool.host_tier import FrameCopy

MAX_COPIES = 32
"""Frames of a batch. Enqueuing one takes a microsecond and a half of the thread that also runs decode steps."""


NONE: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True)
class CopyBatch:
    """Copies of one direction, of which no two touch the same frame: they may be carried out in any order.

    after: numbers of batches of the other direction that have to end first.
    """

    number: int
    is_stowed: bool
    after: frozenset[int]
    copies: list[FrameCopy] = field(default_factory=list)
    frames: set[int] = field(default_factory=set)
    host_frames: set[int] = field(default_factory=set)

    def takes(self, copy: FrameCopy) -> bool:
        """Whether the copy may be one of them."""
        is_apart = self.frames.isdisjoint(copy.frames) and self.host_frames.isdisjoint(copy.host_frames)
        return is_apart and len(self.frames) + len(copy.frames) <= MAX_COPIES


class _Way:
    """One direction: batches that wait, in order; by frame, on either side, the newest batch that has it."""

    def __init__(self) -> None:
        self.waiting: deque[CopyBatch] = deque()
        self.by_frame: dict[int, int] = {}
        self.by_host_frame: dict[int, int] = {}

    def touching(self, copy: FrameCopy) -> frozenset[int]:
        if not self.by_frame:  # as a rule: pages go one way for a while
            return NONE
        found = {self.by_frame[frame] for frame in copy.frames if frame in self.by_frame}
        return frozenset(found.union(self.by_host_frame[f] for f in copy.host_frames if f in self.by_host_frame))

    def forget(self, batch: CopyBatch) -> None:
        for newest, frames in ((self.by_frame, batch.frames), (self.by_host_frame, batch.host_frames)):
            for frame in frames:
                if newest.get(frame) == batch.number:
                    del newest[frame]


class CopyOrder:
    """Each way carries out its batches one after another, as `next` gives them out; `ended` is told of each."""

    def __init__(self) -> None:
        self._ways = {is_stowed: _Way() for is_stowed in (True, False)}
        self._unfinished: set[int] = set()
        self._num_batches = 0

    @property
    def num_unfinished(self) -> int:
        """Batches that have not ended."""
        return len(self._unfinished)

    def add(self, copy: FrameCopy) -> None:
        way, other = self._ways[copy.is_stowed], self._ways[not copy.is_stowed]
        after = other.touching(copy)
        batch = way.waiting[-1] if way.waiting else None
        if batch is None or not batch.takes(copy) or not after <= batch.after:
            self._num_batches += 1
            batch = CopyBatch(self._num_batches, copy.is_stowed, after)
            self._unfinished.add(batch.number)
            way.waiting.append(batch)
        batch.copies.append(copy)
        batch.frames.update(copy.frames)
        batch.host_frames.update(copy.host_frames)
        way.by_frame.update(dict.fromkeys(copy.frames, batch.number))
        way.by_host_frame.update(dict.fromkeys(copy.host_frames, batch.number))

    def next(self, *, is_stowed: bool) -> CopyBatch | None:
        """The way's next batch, if what it comes after has ended."""
        waiting = self._ways[is_stowed].waiting
        return waiting.popleft() if waiting and self._unfinished.isdisjoint(waiting[0].after) else None

    def ended(self, batch: CopyBatch) -> None:
        self._unfinished.discard(batch.number)
        self._ways[batch.is_stowed].forget(batch)

    def touching(self, frames: Iterable[int]) -> frozenset[int]:
        """The batches that have not ended and copy some of these frames of the pool, from or to them."""
        ways = self._ways.values()
        return frozenset(way.by_frame[frame] for frame in frames for way in ways if frame in way.by_frame)

    def unfinished(self, numbers: frozenset[int]) -> frozenset[int]:
        """Those of these batches that have not ended."""
        return numbers & self._unfinished

    def have_ended(self, numbers: frozenset[int]) -> bool:
        return self._unfinished.isdisjoint(numbers)
