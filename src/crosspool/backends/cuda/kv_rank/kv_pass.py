"""A captured attention pass with the frame tables of its rows: what one (model, lane, bucket) keeps on the KV rank."""

from collections.abc import Sequence

import numpy as np
import torch

from crosspool.backends.base import IntArray
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kernels.attention import AttentionScratch
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_frames.frame_tables import FrameTables
from crosspool.backends.cuda.kv_frames.own_pages import OwnRows
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.kv_rank.attention_pass import AttentionPass, Crossing
from crosspool.backends.cuda.kv_rank.exchange import TokenHome
from crosspool.backends.cuda.kv_rank.head_exchange import HeadHome
from crosspool.backends.cuda.loading.weights import AttentionWeights
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import ModelSpec


class KVRows:
    """Buffers of `bucket` rows and their frame tables, which are uploaded only where they changed."""

    def __init__(
        self,
        kernels: Launcher,
        spec: ModelSpec,
        weights: AttentionWeights,
        frames: torch.Tensor,
        geometry: PageGeometry,
        bucket: int,
        max_pages: int,
        number: int | None = None,
        scratch: AttentionScratch | None = None,
    ) -> None:
        """number: of this KV rank, where each page lies whole on one of several (`own_pages.py`).
        scratch: of the lane.
        """
        device = frames.device
        self.own: OwnRows | None = None
        self._tables: FrameTables | None = None
        if number is None:
            self._tables = FrameTables(bucket, max_pages, geometry.frames_per_page, device)
            tables = self._tables.tables
        else:
            self.own = OwnRows(geometry, bucket, max_pages, number, device)
            tables = self.own.tables.tables
        cache = PagedCache(frames=frames, frame_table=tables, geometry=geometry)
        self.half = AttentionHalf(kernels, spec, weights, cache, bucket, scratch=scratch)

    def are_set(self, tables: list[IntArray]) -> bool:
        """Whether `set` has nothing to upload."""
        return self._tables is not None and self._tables.has(tables)

    def set(self, tables: list[IntArray], positions: Sequence[int] | IntArray) -> None:
        """Row r is a token at positions[r] of a sequence with the block table tables[r], which never changes in place.

        Enqueued on torch's current stream.
        """
        if self._tables is not None:
            self._tables.set(tables)
        if self.own is not None:
            self.own.set(tables, np.array(positions))


class KVPass(AttentionPass):
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
        home: TokenHome | HeadHome | None = None,
    ) -> None:
        super().__init__(kernels, lane, rows.half, crossing, samples=samples, is_decode=is_decode, home=home)
        self.rows = rows
