"""The device's view of the shared KV frames: one arena, and for each row of a step its frame table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from crosspool.backends.cuda.kernels.params import CacheView
from crosspool.kv_pool.geometry import PageGeometry


@dataclass(frozen=True, kw_only=True)
class PagedCache:
    """frames: (num_frames, frame_bytes) uint8. frame_table: (rows, pages, frames_per_page) int32, on the same device.

    A token's slot is one row of `geometry.elements_per_token_layer` elements: GQA keys of all heads then values of all
    heads; MLA the latent then the rope key. Frame 0 must be valid memory: unused table entries point there.
    """

    frames: torch.Tensor
    frame_table: torch.Tensor
    geometry: PageGeometry

    def view(self, layer: int) -> CacheView:
        """Kernel parameters that reach this layer's slots."""
        geometry = self.geometry
        _rows, pages, frames_per_page = self.frame_table.shape
        return CacheView(
            frames=self.frames.data_ptr(),
            frame_table=self.frame_table.data_ptr() + 4 * geometry.frame_of_layer(layer),
            frame_bytes=geometry.frame_bytes,
            layer_offset_bytes=geometry.offset_of_layer(layer),
            table_row_stride=pages * frames_per_page,
            table_page_stride=frames_per_page,
            page_tokens=geometry.page_tokens,
            token_bytes=geometry.token_layer_bytes,
        )


def frame_table_rows(
    block_tables: Sequence[Sequence[Sequence[int]]], max_pages: int, frames_per_page: int
) -> np.ndarray[tuple[int, int, int], np.dtype[np.int32]]:
    """(rows, max_pages, frames_per_page) int32 from each row's pages, a page being its list of frames; 0 elsewhere."""
    table = np.zeros((len(block_tables), max_pages, frames_per_page), dtype=np.int32)
    for row, pages in enumerate(block_tables):
        if len(pages) > max_pages:
            raise ValueError(f"row {row} holds {len(pages)} pages, more than the table's {max_pages}")
        if pages:
            table[row, : len(pages)] = pages
    return table
