"""Which context lengths three layouts still admit, with a few requests of every model at once.

Estimated from placement: a request is admitted when its KV fits beside the requests already there. Static partition:
each model has its GPUs. Elastic pool: models share every GPU's free memory; attention with fewer KV heads than GPUs
puts a request on one group of them. CrossPool: one pool of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

import numpy as np

from crosspool.planner.facts import ModelFacts
from crosspool.planner.group import Split
from crosspool.planner.layouts import Hosting, Room, shard_bytes
from crosspool.planner.parallelism import monolithic_share_seen
from crosspool.units import ceil_div
from crosspool.workload.lengths import LogUniform

BINS = ((4, 8), (8, 16), (16, 32), (32, 64), (64, 128))
"""Thousands of prompt tokens, as LongAlign is cut."""
OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Wish:
    """One request that wants to be admitted."""

    model: ModelFacts
    tokens: int


def draw_wishes(models: Sequence[ModelFacts], bin_k: tuple[int, int], each: int, seed: int) -> list[Wish]:
    """`each` requests of every model, prompts log-uniform in the bin, in turn: a, b, c, a, b, c."""
    rng = np.random.default_rng([seed, *bin_k])
    lengths = LogUniform(shortest=bin_k[0] * 1024, longest=bin_k[1] * 1024, output_tokens=OUTPUT_TOKENS)
    prompts = lengths.draw(rng, each * len(models))[0]
    return [Wish(models[idx % len(models)], int(prompt) + OUTPUT_TOKENS) for idx, prompt in enumerate(prompts)]


def admitted_pool(wishes: Sequence[Wish], split: Split) -> int:
    """Requests that fit the shared pool of pages one after another."""
    free, count = split.usable_frames, 0
    for wish in wishes:
        geometry = wish.model.geometry(split.frame_bytes)
        frames = ceil_div(wish.tokens, geometry.page_tokens) * geometry.frames_per_page
        if frames <= free:
            free, count = free - frames, count + 1
    return count


def admitted_monolithic(wishes: Sequence[Wish], hosting: Hosting, room: Room) -> int:
    """Requests that fit GPUs which hold weights and KV, each in the emptiest group of GPUs that its heads allow."""
    models = {wish.model.name: wish.model for wish in wishes}
    free = [float(room.bytes_per_gpu)] * room.num_gpus
    places = {name: [gpu for gpu, names in enumerate(hosting) if name in names] for name in models}
    for name, gpus in places.items():
        for gpu in gpus:
            free[gpu] -= shard_bytes(models[name], len(gpus))
    count = 0
    for wish in wishes:
        gpus = places[wish.model.name]
        size = floor(len(gpus) * monolithic_share_seen(wish.model.num_kv_heads, len(gpus)))
        while len(gpus) % size:
            size -= 1
        groups = [gpus[start : start + size] for start in range(0, len(gpus), size)]
        group = max(groups, key=lambda group: min(free[gpu] for gpu in group))
        needed = wish.tokens * wish.model.kv_bytes_per_token / size
        if all(free[gpu] >= needed for gpu in group):
            count += 1
            for gpu in group:
                free[gpu] -= needed
    return count
