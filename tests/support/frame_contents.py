"""What the slots of a simulated KV rank's frames hold: enough to tell a page with other tokens from the right one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from crosspool.kv_pool.host_tier import FrameCopy

Page = tuple[int, ...]


@dataclass
class Marks:
    """A sequence's slots as attention would have them: each mark depends on every token up to it, and on the model."""

    model: str
    marks: list[int] = field(default_factory=list)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.marks.append(hash((self.marks[-1] if self.marks else self.model, token_id)))


class FrameContents:
    """Frame to its marks by slot. A frame that another model or another place of a page writes into loses the rest."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int], tuple[tuple[str, int], dict[int, int]]] = {}
        self._host: dict[tuple[str, int], tuple[tuple[str, int], dict[int, int]]] = {}

    def spoil(self, kv_rank: str, model: str, page: Page, slots: range) -> None:
        """A step is about to write these slots: nobody may rely on them before it has ended well."""
        self._write(kv_rank, model, page, {slot: 0 for slot in slots})

    def write(self, kv_rank: str, model: str, page: Page, slots: range, marks: Sequence[int]) -> None:
        self._write(kv_rank, model, page, dict(zip(slots, marks, strict=True)))

    def _write(self, kv_rank: str, model: str, page: Page, marks: dict[int, int]) -> None:
        for place, frame in enumerate(page):
            whose, slots = self._frames.get((kv_rank, frame), (None, {}))
            if whose != (model, place):
                slots = {}
                self._frames[kv_rank, frame] = ((model, place), slots)
            slots.update(marks)

    def copy(self, kv_rank: str, rank: str, copies: Sequence[FrameCopy]) -> None:
        """To `rank`'s host memory and back; its frames are those of `kv_rank`."""
        for each in copies:
            for frame, host_frame in zip(each.frames, each.host_frames, strict=True):
                assert host_frame > 0
                source, target = (self._frames, self._host) if each.is_stowed else (self._host, self._frames)
                here, there = ((kv_rank, frame), (rank, host_frame))
                found = source.get(here if each.is_stowed else there)
                assert found is not None, f"a copy of nothing: {each}"
                target[there if each.is_stowed else here] = (found[0], dict(found[1]))

    def check(self, kv_rank: str, model: str, page: Page, marks: Sequence[int]) -> None:
        """The page's first slots hold `marks`, in each of its frames."""
        for place, frame in enumerate(page):
            whose, slots = self._frames.get((kv_rank, frame), (None, {}))
            assert whose == (model, place), f"frame {frame} of {kv_rank} holds KV of {whose}, not of {model}"
            for slot, mark in enumerate(marks):
                assert slots.get(slot) == mark, f"slot {slot} of frame {frame} of {kv_rank} holds other tokens' KV"

    def lose(self, kv_rank: str, frames: range | None = None) -> None:
        """What the rank's frames held is gone, or what these of them did."""
        lost = {key for key in self._frames if key[0] == kv_rank and (frames is None or key[1] in frames)}
        self._frames = {key: value for key, value in self._frames.items() if key not in lost}

    def lose_host(self, rank: str) -> None:
        """What the rank's host memory held is gone."""
        self._host = {key: value for key, value in self._host.items() if key[0] != rank}
