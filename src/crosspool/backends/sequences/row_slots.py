"""RowSlots: where one row of a step lies in the batch and in the cache."""

from dataclasses import dataclass

from crosspool.backends.base import IntArray
from crosspool.scheduler.step import StepRow


@dataclass(frozen=True, slots=True)
class RowSlots:
    """Where one row of a step lies: tokens [start, stop) of the batch, at positions from `first_position` on.

    frames: the row's block table, (frames_per_page, num_pages):
    `frames[layer // layers_per_frame][position // page_tokens]`.
    """

    start: int
    stop: int
    first_position: int
    frames: IntArray

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_slots(self) -> int:
        """Slots this row's last token sees: those cached before and the step's own."""
        return self.first_position + self.stop - self.start


def row_slots(row: StepRow, table: IntArray, start: int, page_tokens: int) -> RowSlots:
    """Where the row lies, given its block table; `start` is its first token's index in the batch."""
    end = row.num_cached_tokens + row.num_new_tokens
    if end > table.shape[1] * page_tokens:
        raise ValueError(
            f"sequence {row.sequence_id} needs {end} slots and has {table.shape[1]} pages of {page_tokens}; "
            "send its new pages with the row"
        )
    return RowSlots(start, start + row.num_new_tokens, row.num_cached_tokens, table)
