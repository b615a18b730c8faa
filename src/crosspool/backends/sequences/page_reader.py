"""PageReader: what a page's frame numbers mean on one KV rank.

A frame's number says which rank it lies on: frame f of a deployment lies on its KV rank `f // num_frames`. A page holds
frames of one rank, or, where a model's heads are cut over ranks, as many frames of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosspool.backends.base import IntArray

NO_FRAME = 0
"""Stands for the frames of a page that lies on another rank; what is written there is written to no page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageReader:
    """Turns pages into entries of this rank's block tables: frames of its own arena, numbered from 0.

    first_frame: number of the arena's frame 0. num_frames: of each rank's arena; None: there is but one rank.
    part, num_parts: which of a page's parts is this rank's, where every rank has one.
    is_spread: a page may lie on another rank. Block tables then have a last line, the number of each page's rank.
    """

    model: str
    frames_per_page: int  # on one rank
    first_frame: int = 0
    num_frames: int | None = None
    part: int = 0
    num_parts: int = 1
    is_spread: bool = False

    def empty(self) -> IntArray:
        """The block table of a sequence without pages: (frames_per_page, 0), one line more where pages are spread."""
        return np.zeros((self.frames_per_page + self.is_spread, 0), dtype=np.int64)

    def entries(self, pages: Sequence[tuple[int, ...]], sequence_id: int) -> IntArray:
        """Columns of a block table. Raises ValueError for pages that cannot be this model's on this rank."""
        width = self.frames_per_page
        columns = []
        for page in pages:
            own = page[self.part * width : (self.part + 1) * width]
            number = self._rank_number(own)
            is_here = number == self._rank_number((self.first_frame + 1,))
            if len(page) != width * self.num_parts or number is None or not (is_here or self.is_spread):
                raise ValueError(self._error(page, sequence_id))
            column = [frame - self.first_frame for frame in own] if is_here else [NO_FRAME] * width
            columns.append([*column, number] if self.is_spread else column)
        return np.array(columns, dtype=np.int64).T

    def _rank_number(self, frames: tuple[int, ...]) -> int | None:
        """The rank that all of the frames lie on; None if there is none, or a reserved frame is among them."""
        if not frames or min(frames) < 1:
            return None
        if self.num_frames is None:
            return 0
        if any(frame % self.num_frames == 0 for frame in frames):
            return None
        numbers = {frame // self.num_frames for frame in frames}
        return numbers.pop() if len(numbers) == 1 else None

    def _error(self, page: tuple[int, ...], sequence_id: int) -> str:
        each = "" if self.num_parts == 1 else f" on each of {self.num_parts} KV ranks"
        first = self.first_frame + 1
        numbers = "" if self.num_frames is None or self.is_spread else f" from {first} on"
        return (
            f"page {page} of sequence {sequence_id}: a page of {self.model} is {self.frames_per_page} frames{each}"
            f"{numbers}, and frame 0 is reserved"
        )
