"""Backing: how the models of one KV rank reach their frames. The engine owns frames, a backing gives them spots."""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from crosspool.kv_pool.pool import Page


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameRange:
    """Addresses through which one model reaches its pages: frame i of a spot lies at `base + i * frame_bytes`."""

    base: int
    num_frames: int
    frame_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_frames * self.frame_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BackingCounts:
    """What a backing has done since it was made. An arena does nothing.

    absent_frames: those whose memory was given back to the driver.
    decode_waits: steps of decode that waited for the driver although unmapped frames were there: 0 if all goes well.
    full_waits: the same where every frame was mapped already, so that one had to be unmapped first.
    prefill_waits: steps of prefill that waited. longest_wait_s: of all waits.
    """

    maps: int = 0
    unmaps: int = 0
    failures: int = 0
    mapped_frames: int = 0
    absent_frames: int = 0
    decode_waits: int = 0
    full_waits: int = 0
    prefill_waits: int = 0
    longest_wait_s: float = 0.0


class Backing(Protocol):
    """Calls come from the thread that runs steps; none of them but `spots` may wait."""

    def add_model(self, model: str, frames_per_page: int) -> FrameRange:
        """Addresses for a model. Frame 0 of the range is the pool's frame 0, which masked rows may touch."""
        ...

    def remove_model(self, model: str) -> None:
        """No step in flight uses the model any more."""
        ...

    def begin_step(self, step: Hashable, sequence_ids: Collection[int]) -> None:
        """What these sequences have stays where it is until the step has ended, even if they are forgotten."""
        ...

    def end_step(self, step: Hashable) -> None: ...

    def spots(self, model: str, sequence_id: int, pages: Sequence[Page], *, is_decode: bool) -> tuple[Page, ...]:
        """Where in the model's range the pages lie, as lists of the range's frames; the sequence uses them from now on.

        Waits where a page has no spot yet. Raises DriverError if the driver cannot give it one.
        """
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """The sequences use nothing any more."""
        ...

    def expect(self, model: str, pages: Iterable[Page]) -> None:
        """The model will get these pages soon."""
        ...

    def give_back(self, model: str, pages: Iterable[Page]) -> None:
        """Nobody uses these pages, and the model will not get them again soon."""
        ...

    def withdraw(self, frames: Iterable[int]) -> None:
        """Nobody has these frames until they are restored: their memory goes back to the driver, if it can."""
        ...

    def restore(self, frames: Iterable[int]) -> None:
        """Models may get these frames again; they are absent until the driver has given memory for them."""
        ...

    def counts(self) -> BackingCounts: ...

    def close(self) -> None: ...
