"""Which of a sequence's pages lie on this KV rank, where each page lies whole on one of several (split `tokens`).

Attention does not care for the order of slots once keys are rotated, so a rank attends to its own pages as if they
were all: side by side in a table of their own, with a length of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from crosspool.backends.base import IntArray
from crosspool.backends.cuda.kv_frames.frame_tables import FrameTables
from crosspool.kv_pool.geometry import PageGeometry


@dataclass(frozen=True, slots=True)
class OwnPages:
    """table: (frames_per_page, own pages). before: (pages + 1), own pages among the first n."""

    table: IntArray
    before: IntArray

    @classmethod
    def of(cls, table: IntArray, number: int) -> "OwnPages":
        """table: a block table whose last line says each page's KV rank; `number` is this rank's."""
        is_own = table[-1] == number
        return cls(np.ascontiguousarray(table[:-1, is_own]), np.concatenate([[0], np.cumsum(is_own)]))

    def slots(self, positions: IntArray, page_tokens: int) -> tuple[IntArray, IntArray]:
        """For tokens at `positions`: own slots up to and with theirs, and their own slot or -1."""
        page, rest = np.divmod(positions, page_tokens)
        is_own = self.before[page + 1] > self.before[page]
        lengths = self.before[page] * page_tokens + np.where(is_own, rest + 1, 0)
        return lengths, np.where(is_own, lengths - 1, -1)


class OwnRows:
    """A pass's rows as this rank's kernels see them.

    lengths, slots: (bucket) int32 on the device, of `OwnPages.slots`. Frame tables are uploaded where they changed.
    """

    def __init__(self, geometry: PageGeometry, bucket: int, max_pages: int, number: int, device: torch.device) -> None:
        self._page_tokens, self._number = geometry.page_tokens, number
        self.tables = FrameTables(bucket, max_pages, geometry.frames_per_page, device)
        self._ints = torch.zeros(2, bucket, dtype=torch.int32, device=device)
        self._held: list[tuple[IntArray, OwnPages] | None] = [None] * bucket

    @property
    def lengths(self) -> torch.Tensor:
        return self._ints[0]

    @property
    def slots(self) -> torch.Tensor:
        return self._ints[1]

    def set(self, tables: Sequence[IntArray], positions: IntArray) -> None:
        """Row r is a token at positions[r] of a sequence with the block table tables[r], which never changes in place.

        Enqueued on torch's current stream.
        """
        ints = np.empty((2, len(tables)), dtype=np.int32)
        own: list[OwnPages] = []
        for row, table in enumerate(tables):
            held = self._held[row]
            if held is None or held[0] is not table:
                is_last = row > 0 and tables[row - 1] is table
                held = self._held[row] = (table, own[-1] if is_last else OwnPages.of(table, self._number))
            own.append(held[1])
            ints[:, row] = np.concatenate(held[1].slots(positions[row : row + 1], self._page_tokens))
        found = [pages.table for pages in own]
        if not self.tables.has(found):
            self.tables.set(found)
        self._ints.copy_(torch.from_numpy(ints), non_blocking=True)


def ranks_of(table: IntArray, num_slots: int, page_tokens: int) -> set[int]:
    """The numbers of the KV ranks on which the first `num_slots` slots of a sequence lie."""
    return set(table[-1, : (num_slots - 1) // page_tokens + 1].tolist())
