"""Decode attention over a paged cache, layer after layer: what GPU benchmarks of the KV pool time and check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.bench_attention import projections
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kernels.attention import AttentionScratch, attention_decode
from crosspool.backends.cuda.kernels.attention_variants import key_value_dims, num_splits
from crosspool.backends.cuda.kernels.rope import RopeTable, rope_cache
from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.backends.cuda.kv_frames.vmm import CudaVmmDriver, range_memory
from crosspool.kv_pool.backing.vmm import VmmBacking
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import MiB

SEED = 11
FRAME_BYTES = 2 * MiB


def geometry_of(spec: GQASpec | MLASpec, layers: int, page_tokens: int = 256) -> PageGeometry:
    return PageGeometry(
        num_layers=layers,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=page_tokens,
        frame_bytes=FRAME_BYTES,
    )


@dataclass
class CacheAttention:
    """Decode attention of one sequence of `context` tokens."""

    kernels: DeviceKernels
    spec: GQASpec | MLASpec
    context: int

    def __post_init__(self) -> None:
        self.positions = torch.full((1,), self.context - 1, dtype=torch.int32, device="cuda")
        self.lengths = self.positions + 1
        self.rope = RopeTable.allocate(self.spec.rope, 1, self.kernels.device)
        self.rope.update(self.kernels, self.positions)
        torch.manual_seed(SEED)
        self.inputs, self._keep = projections(self.spec, self.rope, 1)
        self.scratch = AttentionScratch.for_specs({self.spec}, 1, self.kernels.num_sms, self.kernels.device)
        self.splits = num_splits(self.spec, self.kernels.num_sms)
        _, value_dim = key_value_dims(self.spec)
        self.out = torch.empty(1, self.spec.num_heads, value_dim, dtype=torch.bfloat16, device="cuda")

    def run(self, cache: PagedCache, layer: int) -> None:
        attention_decode(
            *(self.kernels, self.spec, self.inputs, cache, layer, self.positions, self.lengths, self.out, self.scratch),
            splits=self.splits,
            one_row_per_sequence=True,
            overlap=False,
        )

    def outputs(self, cache: PagedCache, layer: int) -> torch.Tensor:
        """(1, heads, value_dim) bf16; what the kernel leaves out stays NaN."""
        self.out.fill_(torch.nan)
        self.run(cache, layer)
        torch.cuda.synchronize()
        return self.out.clone()

    def layers(self, cache: PagedCache, units: int, layers: int) -> Callable[[], None]:
        """`units` layers of attention, over and over the first `layers` of the cache."""

        def work() -> None:
            for unit in range(units):
                self.run(cache, unit % layers)

        return work

    def query(self, cache: PagedCache, layer: int) -> torch.Tensor:
        """(heads, key_dim) float32: normed and rotated. Its own slot is written again, with the same values."""
        key_dim, _ = key_value_dims(self.spec)
        query = torch.empty(1, self.spec.num_heads, key_dim, dtype=torch.bfloat16, device="cuda")
        rope_cache(self.kernels, self.spec, self.inputs, cache, layer, self.positions, query)
        torch.cuda.synchronize()
        return query[0].float()


class MappedCache:
    """The contents of a cache in frames that are mapped into one range. Close it after its last use."""

    def __init__(self, source: PagedCache, device: int = 0) -> None:
        """As many frames as the source has, of which the source's own are mapped."""
        num_frames, geometry = len(source.frames), source.geometry
        self.backing = VmmBacking(CudaVmmDriver(device), num_frames, FRAME_BYTES, timeout_s=60.0)
        found = self.backing.add_model("model", geometry.frames_per_page)
        memory = range_memory(found, torch.device("cuda"))
        table = source.frame_table.cpu().numpy()
        spots = np.zeros_like(table)
        for row, pages in enumerate(table.tolist()):
            spots[row] = self.backing.spots("model", row, [tuple(page) for page in pages], is_decode=False)
        pairs = zip(table.reshape(-1).tolist(), spots.reshape(-1).tolist(), strict=True)
        for source_frame, spot in pairs:
            memory[spot].copy_(source.frames[source_frame])
        self.cache = replace(source, frames=memory, frame_table=torch.from_numpy(spots).cuda())

    def close(self) -> None:
        torch.cuda.synchronize()
        self.backing.close()


def spread_cache(geometry: PageGeometry, tokens: int, num_frames: int, seed: int = SEED) -> PagedCache:
    """One sequence of seeded values, its frames in random order among all those of a pool of `num_frames`."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    arena = torch.empty(num_frames, geometry.frame_bytes // 2, dtype=torch.bfloat16, device="cuda")
    arena.normal_(generator=generator)
    pages = geometry.num_pages(tokens)
    order = torch.randperm(num_frames - 1, generator=generator, device="cuda").to(torch.int32) + 1
    table = order[: pages * geometry.frames_per_page].view(1, pages, geometry.frames_per_page).contiguous()
    return PagedCache(frames=arena.view(torch.uint8), frame_table=table, geometry=geometry)


def layer_parts(cache: PagedCache, layer: int, pages: slice) -> tuple[torch.Tensor, slice]:
    """Frames (int64) with the layer's part of these pages of row 0, and where in each of them it lies (elements)."""
    geometry = cache.geometry
    first = geometry.offset_of_layer(layer) // 2
    frames = cache.frame_table[0, pages, geometry.frame_of_layer(layer)].long()
    return frames, slice(first, first + geometry.layer_bytes // 2)


def in_one_piece(source: PagedCache) -> PagedCache:
    """Row 0's contents as one tensor a layer, tokens in order: no paging, but the same kernel."""
    geometry, num_pages = source.geometry, source.frame_table.shape[1]
    elements = source.frames.view(torch.bfloat16)
    layers, whole = geometry.num_layers, num_pages * geometry.layer_bytes
    memory = torch.zeros(layers + 1, whole // 2, dtype=torch.bfloat16, device="cuda")
    for layer in range(layers):
        frames, part = layer_parts(source, layer, slice(0, num_pages))
        memory[layer + 1] = elements[frames, part].reshape(-1)
    table = torch.arange(1, layers + 1, dtype=torch.int32, device="cuda").view(1, 1, layers).contiguous()
    unpaged = replace(geometry, page_tokens=num_pages * geometry.page_tokens, frame_bytes=whole)
    return PagedCache(frames=memory.view(torch.uint8), frame_table=table, geometry=unpaged)
