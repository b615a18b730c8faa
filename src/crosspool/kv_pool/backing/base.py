"""What a backing, which gives the engine's frames spots in models' ranges of addresses, has and has done."""

from dataclasses import dataclass


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
