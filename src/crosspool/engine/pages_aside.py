"""PagesAside: frames of one KV rank for sequences that have pages on other ranks too."""

from collections.abc import Callable
from collections.abc import Sequence as Items

from crosspool.engine.admission import PageBudget
from crosspool.engine.claims import Claim
from crosspool.kv_pool.pool import Page


class PagesAside:
    """All that such a sequence may reach here is claimed when it is admitted, so it never waits for a page of one rank
    while it holds those of another. The budget counts it as held, though pages are handed out one by one.

    allocate(model, count): pages that the budget has granted.
    """

    def __init__(self, budget: PageBudget, allocate: Callable[[str, int], tuple[Page, ...]]) -> None:
        self._budget = budget
        self._allocate = allocate
        self._left: dict[int, int] = {}  # by sequence: frames claimed that it has not been handed yet

    @property
    def num_frames(self) -> int:
        """Frames claimed and not handed out."""
        return sum(self._left.values())

    def of(self, sequence_ids: Items[int]) -> int:
        """The same of these sequences, of which others claim nothing here."""
        return sum(self._left.get(sequence_id, 0) for sequence_id in sequence_ids)

    def admits(self, model: str, num_frames: int) -> bool:
        return self._budget.admits(Claim(num_frames, num_frames, num_frames, model))

    def open(self, sequence_id: int, model: str, num_frames: int, num_had: int = 0) -> None:
        """Claim `num_frames` for a sequence. num_had: of these, frames it has from the beginning, in cached pages."""
        self._budget.open(sequence_id, Claim(num_frames, num_frames, num_frames, model))
        self._left[sequence_id] = num_frames - num_had

    def hand_out(self, sequence_id: int, model: str, num_pages: int, frames_per_page: int) -> tuple[Page, ...]:
        """Pages of what was claimed for the sequence."""
        self._left[sequence_id] -= num_pages * frames_per_page
        return self._allocate(model, num_pages)

    def stop_growing(self, sequence_id: int) -> None:
        """The sequence asks for no more than it has."""
        self._budget.give_up(sequence_id, self._left[sequence_id])
        self._left[sequence_id] = 0

    def close(self, sequence_id: int) -> None:
        """The sequence claims nothing any more; its pages are next to be taken back, or kept for others."""
        del self._left[sequence_id]
        self._budget.close(sequence_id)
