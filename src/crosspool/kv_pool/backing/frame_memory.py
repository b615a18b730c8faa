"""FrameMemory: which frames have physical memory, and whose is to be given back or created again. Pure."""

from collections.abc import Collection, Iterable
from itertools import islice

from crosspool.kv_pool.backing.operations import CreateFrame, ReleaseFrame

NUM_LOOKED_AT = 32
"""Frames whose memory is to go that are looked at for one operation."""

RETRY_S = 1.0
"""How long all of this rests after a failure."""


class FrameMemory:
    """All frames have memory at first. *Leaving* ones are to lose it, *absent* ones have none, *coming* ones are absent
    and to have some again."""

    def __init__(self) -> None:
        self._absent: set[int] = set()
        self._leaving: dict[int, None] = {}  # in order
        self._coming: dict[int, None] = {}
        self._not_before_s = 0.0

    @property
    def num_absent(self) -> int:
        return len(self._absent)

    @property
    def has_backlog(self) -> bool:
        return bool(self._leaving or self._coming)

    @property
    def retry_s(self) -> float | None:
        """When something that failed is tried again."""
        return self._not_before_s if self._not_before_s and self.has_backlog else None

    def withdraw(self, frame: int) -> bool:
        """The frame's memory is to go; False where it has none any more."""
        self._coming.pop(frame, None)
        if frame in self._absent:
            return False
        self._leaving[frame] = None
        return True

    def restore(self, frames: Iterable[int]) -> None:
        """Frames may be used again."""
        for frame in frames:
            if frame in self._leaving:
                del self._leaving[frame]
            elif frame in self._absent:
                self._coming[frame] = None

    def first_absent(self, frames: Iterable[int]) -> int | None:
        return next((frame for frame in frames if frame in self._absent), None)

    def creation_of(self, frame: int, now: float) -> CreateFrame | None:
        """Give this frame memory now, if it is to have some again."""
        return CreateFrame(frame) if frame in self._coming and now >= self._not_before_s else None

    def creation(self, now: float) -> CreateFrame | None:
        """Give the first frame memory that is to have some again."""
        return None if not self._coming else self.creation_of(next(iter(self._coming)), now)

    def release(self, mapped: Collection[int], now: float) -> ReleaseFrame | None:
        """Take the memory of the first frame that is to lose it and is not among `mapped`."""
        if now < self._not_before_s:
            return None
        looked_at = islice(self._leaving, NUM_LOOKED_AT)
        return next((ReleaseFrame(frame) for frame in looked_at if frame not in mapped), None)

    def begin(self, operation: ReleaseFrame) -> None:
        """The driver is at it: whoever wants the frame meanwhile waits until it has memory again."""
        del self._leaving[operation.frame]
        self._absent.add(operation.frame)

    def ended(self, operation: CreateFrame | ReleaseFrame, has_failed: bool, now: float) -> None:
        self._not_before_s = now + RETRY_S if has_failed else 0.0
        if isinstance(operation, CreateFrame) == has_failed:
            return  # without memory, as before a creation and after a release
        frame = operation.frame
        self._absent.discard(frame)
        if frame in self._coming:
            del self._coming[frame]
        else:  # withdrawn again meanwhile, or still to go
            self._leaving[frame] = None
