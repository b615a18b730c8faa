"""The paged KV cache: one flat arena per rank, seen by each layer of each model through views.

A layer's part of a page is `page_tokens` rows of float32; which frame it lies in and where is `PageGeometry`'s rule.
A GQA row is [K of all KV heads | V of all KV heads]; an MLA row is [latent | rope key] and serves as key and, without
its rope part, as value of the one KV head that all query heads share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from crosspool.backends.base import FloatArray, IntArray
from crosspool.backends.numpy.spans import Block, Span, blocks
from crosspool.backends.sequences.row_slots import RowSlots
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec

Arena = npt.NDArray[np.uint8]


def new_arena(num_frames: int, frame_bytes: int) -> Arena:
    """(num_frames, frame_bytes), zeroed lazily by the system. Frame 0 is never handed out."""
    if num_frames < 2 or frame_bytes < 4 or frame_bytes % 4:
        raise ValueError(
            f"{num_frames} frames of {frame_bytes} bytes cannot be an arena; at least 2 frames (the first is reserved) "
            "of a multiple of 4 bytes are needed"
        )
    return np.zeros((num_frames, frame_bytes), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class StepSlots:
    """The slots of one step's tokens: positions (num_tokens,), and the target of the step's one scatter per layer."""

    rows: tuple[RowSlots, ...]
    positions: IntArray
    write_frames: tuple[IntArray, ...]  # per frame of a page: (num_tokens,)
    write_offsets: IntArray  # (num_tokens,) slot within the page
    is_decode: bool  # every row runs one token
    page_tokens: int
    _blocks: dict[int | None, tuple[Block, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[RowSlots], page_tokens: int) -> "StepSlots":
        if all(row.stop - row.start == 1 for row in rows):
            return cls._of_single_tokens(rows, page_tokens)
        positions = np.concatenate([np.arange(row.first_position, row.num_slots) for row in rows])
        pages, offsets = np.divmod(positions, page_tokens)
        num_frames = len(rows[0].frames)
        write_frames = tuple(
            np.concatenate([row.frames[idx][pages[row.start : row.stop]] for row in rows]) for idx in range(num_frames)
        )
        return cls(tuple(rows), positions, write_frames, offsets, False, page_tokens)

    @classmethod
    def _of_single_tokens(cls, rows: Sequence[RowSlots], page_tokens: int) -> "StepSlots":
        """The same where every row runs one token, with plain numbers: a step of few rows spares many small arrays."""
        positions = [row.first_position for row in rows]
        pages = [position // page_tokens for position in positions]
        if len(rows) == 1:
            write_frames = tuple(line[pages[0] : pages[0] + 1] for line in rows[0].frames)
        else:
            columns = [[line[page] for line in row.frames] for row, page in zip(rows, pages, strict=True)]
            write_frames = tuple(np.array(columns, dtype=np.int64).T)
        offsets = np.array([position % page_tokens for position in positions], dtype=np.int64)
        return cls(tuple(rows), np.array(positions, dtype=np.int64), write_frames, offsets, True, page_tokens)

    def blocks(self, window: int | None) -> tuple[Block, ...]:
        """What each row's last token sees; the layers of a step share it."""
        found = self._blocks.get(window)
        if found is None:
            spans = [Span.of(row, window) for row in self.rows]
            found = self._blocks[window] = tuple(blocks(spans, self.page_tokens))
        return found


class LayerCache:
    """One layer's part of every page of the arena, for reading and writing rows of one model."""

    def __init__(self, arena: Arena, geometry: PageGeometry, layer: int, attention: GQASpec | MLASpec) -> None:
        self._page_tokens = geometry.page_tokens
        self._frame_idx = geometry.frame_of_layer(layer)
        first = geometry.offset_of_layer(layer) // 4
        elements = geometry.elements_per_token_layer
        part = arena.view(np.float32)[:, first : first + geometry.page_tokens * elements]
        width = attention.kv_elements_per_token
        self._rows = part.reshape(len(arena), geometry.page_tokens, elements)[:, :, :width]
        self._attention = attention
        keys, values = self._by_head(self._rows)
        self._keys = keys.swapaxes(1, 2).swapaxes(2, 3)  # (frames, kv_heads, D, page_tokens)
        self._values = values.swapaxes(1, 2)  # (frames, kv_heads, page_tokens, D_v)

    @property
    def value_width(self) -> int:
        """Elements of one KV head's value."""
        return int(self._values.shape[-1])

    def _by_head(self, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Views of rows (..., row) as keys (..., kv_heads, D) and values (..., kv_heads, D_v)."""
        attention = self._attention
        if isinstance(attention, MLASpec):
            return rows[..., None, :], rows[..., None, : attention.kv_lora_rank]
        heads = rows.reshape(*rows.shape[:-1], 2, attention.num_kv_heads, attention.head_dim)
        return heads[..., 0, :, :], heads[..., 1, :, :]

    def write(self, rows: FloatArray, slots: StepSlots) -> None:
        """Store (num_tokens, row), or the (row,) of a step's one token, at the step's slots."""
        if rows.ndim == 1:
            self._rows[slots.write_frames[self._frame_idx][0], slots.write_offsets[0]] = rows
        else:
            self.write_at(rows, slots.write_frames, slots.write_offsets)

    def write_at(self, rows: FloatArray, frames: Sequence[IntArray], offsets: IntArray) -> None:
        """Store (num_tokens, row) at `offsets` of pages, whose `frames` are those of each of their places."""
        self._rows[frames[self._frame_idx], offsets] = rows

    @property
    def row_width(self) -> int:
        """Elements of one token."""
        return int(self._rows.shape[-1])

    def read_at(self, frames: Sequence[IntArray], offsets: IntArray) -> FloatArray:
        """(num_tokens, row) at `offsets` of pages, as `write_at` stores them."""
        rows: FloatArray = self._rows[frames[self._frame_idx], offsets]
        return rows

    def read(self, row: RowSlots, begin: int, end: int) -> tuple[FloatArray, FloatArray]:
        """Keys (kv_heads, D, n) and values (kv_heads, n, D_v) of positions [begin, end).

        Views of the arena while these lie in one page, else one gather of the pages they lie in.
        """
        page, last_page = begin // self._page_tokens, (end - 1) // self._page_tokens
        frames = row.frames[self._frame_idx]
        begin -= page * self._page_tokens
        end -= page * self._page_tokens
        if page == last_page:
            frame = frames[page]
            return self._keys[frame, :, :, begin:end], self._values[frame, :, begin:end]
        gathered = self._rows[frames[page : last_page + 1]]
        rows = gathered.reshape(-1, gathered.shape[-1])[begin:end]
        keys, values = self._by_head(rows)
        return keys.transpose(1, 2, 0), values.swapaxes(0, 1)

    def read_block(self, block: Block) -> tuple[FloatArray, FloatArray]:
        """Keys (rows, kv_heads, D, n) and values (rows, kv_heads, n, D_v) of several rows' slots, gathered.

        Slots that a row does not see are zeros, whatever lies there.
        """
        frames = block.frames[self._frame_idx]
        if frames.shape[1] == 1:
            rows: FloatArray = self._rows[frames[:, 0], : block.num_slots]
        else:
            pages = self._rows[frames]
            rows = pages.reshape(len(frames), -1, pages.shape[-1])[:, : block.num_slots]
        for idx, begin, end in block.padding:
            rows[idx, begin:end] = 0
        keys, values = self._by_head(rows)
        return keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)

    def read_rows(self, row: RowSlots) -> FloatArray:
        """(num_slots, row) of everything the row's last token sees."""
        page = (row.num_slots - 1) // self._page_tokens
        rows: FloatArray = self._rows[row.frames[self._frame_idx][: page + 1]]
        return rows.reshape(-1, rows.shape[-1])[: row.num_slots]

    def read_earlier(self, row: RowSlots) -> FloatArray:
        """(first_position, row) of what was cached before the row's own tokens."""
        return self.read_rows(RowSlots(0, 0, row.first_position, row.frames))


def layer_caches(arena: Arena, geometry: PageGeometry, spec: ModelSpec) -> tuple[LayerCache, ...]:
    """Every layer's view of the arena."""
    return tuple(LayerCache(arena, geometry, idx, layer.attention) for idx, layer in enumerate(spec.layers))
