"""Frame tables of a pass's rows on the device, uploaded only where they changed."""

from operator import is_

import numpy as np
import torch

from crosspool.backends.base import IntArray


class FrameTables:
    """tables: (rows, max_pages, frames_per_page) int32."""

    def __init__(self, rows: int, max_pages: int, frames_per_page: int, device: torch.device) -> None:
        self.tables = torch.zeros((rows, max_pages, frames_per_page), dtype=torch.int32, device=device)
        self._held: list[IntArray | None] = [None] * rows

    def has(self, tables: list[IntArray]) -> bool:
        """Whether `set` has nothing to upload."""
        return all(map(is_, self._held, tables))

    def set(self, tables: list[IntArray]) -> None:
        """Row r reads and writes through tables[r] (frames_per_page, pages); a table never changes in place."""
        first = 0
        while first < len(tables):
            table, stop = tables[first], first + 1
            while stop < len(tables) and tables[stop] is table:
                stop += 1
            if any(held is not table for held in self._held[first:stop]):
                self._upload(first, stop, table)
            first = stop

    def _upload(self, first: int, stop: int, table: IntArray) -> None:
        pages = table.shape[1]
        if pages > self.tables.shape[1]:
            raise ValueError(f"a sequence of {pages} pages; this model's frame tables hold {self.tables.shape[1]}")
        rows = torch.from_numpy(np.ascontiguousarray(table.T, dtype=np.int32))
        self.tables[first:stop, :pages].copy_(rows.expand(stop - first, *rows.shape), non_blocking=True)
        self._held[first:stop] = [table] * (stop - first)
