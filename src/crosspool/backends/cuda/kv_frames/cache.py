"""The device's view of the shared KV frames: one arena, and for each row of a step its frame table."""

from dataclasses import dataclass, field

import torch

from crosspool.backends.cuda.kernels.params import CacheView
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class PagedCache:
    """frames: (num_frames, frame_bytes) uint8. frame_table: (rows, pages, frames_per_page) int32, on the same device.

    A token's slot is one row of `geometry.elements_per_token_layer` elements: GQA keys of all heads then values of all
    heads; MLA the latent then the rope key. Frame 0 must be valid memory: unused table entries point there.
    """

    frames: torch.Tensor
    frame_table: torch.Tensor
    geometry: PageGeometry
    _views: dict[int, CacheView] = field(default_factory=dict, init=False, repr=False, compare=False)

    def view(self, layer: int) -> CacheView:
        """Kernel parameters that reach this layer's slots."""
        found = self._views.get(layer)
        if found is None:
            found = self._views[layer] = self._view(layer)
        return found

    def _view(self, layer: int) -> CacheView:
        geometry = self.geometry
        _rows, pages, frames_per_page = self.frame_table.shape
        return CacheView(
            frames=self.frames.data_ptr(),
            frame_table=self.frame_table.data_ptr() + 4 * geometry.frame_of_layer(layer),
            frame_bytes=geometry.frame_bytes,
            layer_offset_bytes=geometry.offset_of_layer(layer),
            table_row_stride=pages * frames_per_page,
            page_share=ceil_div(1 << 40, geometry.page_tokens),
            table_page_stride=frames_per_page,
            page_tokens=geometry.page_tokens,
            token_bytes=geometry.token_layer_bytes,
        )
