"""ArenaBacking: a backing that does nothing, since every model reaches every frame where it lies. VMM's plain twin."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Protocol

from crosspool.kv_pool.backing.base import BackingCounts, FrameRange
from crosspool.kv_pool.pool import Page


class Backing(Protocol):
    """What `VmmBacking` and its twin have in common."""

    def add_model(self, model: str, frames_per_page: int) -> FrameRange: ...

    def remove_model(self, model: str) -> None: ...

    def begin_step(self, step: Hashable, sequence_ids: Collection[int]) -> None: ...

    def end_step(self, step: Hashable) -> None: ...

    def spots(self, model: str, sequence_id: int, pages: Sequence[Page], *, is_decode: bool) -> tuple[Page, ...]: ...

    def forget(self, sequence_ids: Iterable[int]) -> None: ...

    def expect(self, model: str, pages: Iterable[Page]) -> None: ...

    def give_back(self, model: str, pages: Iterable[Page]) -> None: ...

    def withdraw(self, frames: Iterable[int]) -> None: ...

    def restore(self, frames: Iterable[int]) -> None: ...

    def counts(self) -> BackingCounts: ...


class ArenaBacking:
    """A `Backing` over memory that its owner has allocated at `base`."""

    def __init__(self, base: int, num_frames: int, frame_bytes: int) -> None:
        self._range = FrameRange(base=base, num_frames=num_frames, frame_bytes=frame_bytes)

    def add_model(self, model: str, frames_per_page: int) -> FrameRange:
        return self._range

    def remove_model(self, model: str) -> None: ...

    def begin_step(self, step: Hashable, sequence_ids: Collection[int]) -> None: ...

    def end_step(self, step: Hashable) -> None: ...

    def spots(self, model: str, sequence_id: int, pages: Sequence[Page], *, is_decode: bool) -> tuple[Page, ...]:
        return tuple(pages)

    def forget(self, sequence_ids: Iterable[int]) -> None: ...

    def expect(self, model: str, pages: Iterable[Page]) -> None: ...

    def give_back(self, model: str, pages: Iterable[Page]) -> None: ...

    def withdraw(self, frames: Iterable[int]) -> None: ...

    def restore(self, frames: Iterable[int]) -> None: ...

    def counts(self) -> BackingCounts:
        return BackingCounts()

    def close(self) -> None: ...
