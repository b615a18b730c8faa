"""A captured attention pass with the frame tables of its rows: what one (model, lane, bucket) keeps on the KV rank."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from crosspool.backends.cuda.attention_half import AttentionHalf
from crosspool.backends.cuda.attention_pass import AttentionPass, Crossing
from crosspool.backends.cuda.cache import PagedCache
from crosspool.backends.cuda.lane_memory import LaneMemory
from crosspool.backends.cuda.launch import Launcher
from crosspool.backends.cuda.weights import AttentionWeights
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import ModelSpec

IntArray = npt.NDArray[np.int64]


class KVRows:
    """Buffers of `bucket` rows and their frame tables, which are uploaded only where they changed."""

    def __init__(
        self,
        kernels: Launcher,
        spec: ModelSpec,
        weights: AttentionWeights,
        arena: torch.Tensor,
        geometry: PageGeometry,
        bucket: int,
        max_pages: int,
    ) -> None:
        shape = (bucket, max_pages, geometry.frames_per_page)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=arena.device)
        cache = PagedCache(frames=arena, frame_table=self.tables, geometry=geometry)
        self.half = AttentionHalf(kernels, spec, weights, cache, bucket)
        self._held: list[IntArray | None] = [None] * bucket

    def has_tables(self, tables: list[IntArray]) -> bool:
        """Whether `set_tables` has nothing to upload."""
        return all(held is table for held, table in zip(self._held, tables, strict=True))

    def set_tables(self, tables: list[IntArray]) -> None:
        """Row r reads and writes through tables[r] (frames_per_page, pages); a block table never changes in place."""
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


class KVPass:
    """One way through the kernels on such rows: with or without logits at the end, of prompts or in decode."""

    def __init__(
        self,
        kernels: Launcher,
        lane: LaneMemory,
        rows: KVRows,
        crossing: Crossing,
        *,
        samples: bool,
        is_decode: bool,
        prefetches: bool = True,
    ) -> None:
        self.rows = rows
        self._pass = AttentionPass(
            kernels, lane, rows.half, crossing, samples=samples, is_decode=is_decode, prefetches=prefetches
        )

    def kernels(self) -> Iterator[int]:
        return self._pass.kernels()
