"""Random pages for tests: poisoned arenas, shuffled frames, rows at any length."""

import numpy as np

from crosspool.backends.numpy.kv_cache import LayerCache, StepSlots, new_arena
from crosspool.backends.sequences.row_slots import RowSlots
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec


def poisoned_arena(num_frames: int, frame_bytes: int) -> np.ndarray:
    """Every byte 0xFF: each float32 in it is NaN, so whatever reads an unwritten slot shows."""
    arena = new_arena(num_frames, frame_bytes)
    arena[:] = 0xFF
    return arena


def geometry_for(attention: GQASpec | MLASpec, num_layers: int, page_tokens: int, layers_per_frame: int = 2):
    """Frames with room for `layers_per_frame` layers and a little waste."""
    elements = attention.kv_elements_per_token
    return PageGeometry(
        num_layers=num_layers,
        elements_per_token_layer=elements,
        element_bytes=4,
        page_tokens=page_tokens,
        frame_bytes=layers_per_frame * page_tokens * elements * 4 + 8,
    )


class Pages:
    """Hands out shuffled frames, never frame 0."""

    def __init__(self, geometry: PageGeometry, num_frames: int, seed: int) -> None:
        self.geometry = geometry
        self.free = np.random.default_rng(seed).permutation(np.arange(1, num_frames)).tolist()

    def table(self, num_tokens: int) -> np.ndarray:
        """(frames_per_page, pages) for a sequence of `num_tokens`."""
        shape = (self.geometry.frames_per_page, self.geometry.num_pages(num_tokens))
        return np.array([self.free.pop() for _ in range(shape[0] * shape[1])]).reshape(shape)


def step_slots(tables, first_positions, num_new, page_tokens) -> StepSlots:
    """One row per table: `num_new[i]` tokens at `first_positions[i]`."""
    rows, start = [], 0
    for table, first, count in zip(tables, first_positions, num_new, strict=True):
        rows.append(RowSlots(start, start + count, first, table))
        start += count
    return StepSlots.of(rows, page_tokens)


def caches_for(attention: GQASpec | MLASpec, geometry: PageGeometry, arena: np.ndarray) -> list[LayerCache]:
    return [LayerCache(arena, geometry, layer, attention) for layer in range(geometry.num_layers)]
