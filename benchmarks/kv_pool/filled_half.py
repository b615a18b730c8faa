"""The attention half of some layers of a full-size model, with random weights and a cache that is full."""

from __future__ import annotations

import torch

from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import seeded_cache
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf
from crosspool.backends.cuda.loading.weights import random_attention_weights
from crosspool.kv_pool.geometry import choose_page_tokens, page_geometry
from crosspool.units import MiB


def filled_half(
    kernels: Launcher, device: torch.device, name: str, num_layers: int, rows: int, context: int, seed: int
) -> AttentionHalf:
    """At the last of `context` tokens of each row, embedded; pages are those of the whole model."""
    spec = full_spec(name, num_layers)
    weights = random_attention_weights(spec, seed, device)
    geometry = page_geometry(spec, page_tokens=choose_page_tokens(full_spec(name), 2 * MiB), frame_bytes=2 * MiB)
    cache = seeded_cache(geometry, rows, context, seed, device)
    half = AttentionHalf(kernels, spec, weights, cache, rows, one_row_per_sequence=True)
    half.positions.fill_(context - 1)
    half.lengths.fill_(context)
    half.embed()
    return half
