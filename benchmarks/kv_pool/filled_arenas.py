"""KV arenas that a benchmark draws and ranks in processes of their own map: what they hold depends on frame numbers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.kv_frames.shared_arena import SharedArena

BLOCK_FRAMES = 512
"""Frames drawn from one seed; arenas are multiples of it."""


class FilledArenas:
    """An arena for each of `gpus`, of `num_frames` frames each, numbered one after another.

    `arenas` and `token` go into the `ClusterConfig` of a cluster whose KV ranks are `kv0`, `kv1`, ... on these GPUs.
    """

    def __init__(self, gpus: Sequence[int], num_frames: int, frame_bytes: int, seed: int, std: float) -> None:
        if num_frames % BLOCK_FRAMES:
            raise ValueError(f"arenas of {num_frames} frames; give them a multiple of {BLOCK_FRAMES}")
        self.token = secrets.token_hex(16)
        self.arenas = tuple((f"drawn{idx}", f"kv{idx}") for idx in range(len(gpus)))
        self._held: list[SharedArena] = []
        for idx, gpu in enumerate(gpus):
            with torch.cuda.device(gpu):
                device, driver = torch.device("cuda", gpu), Driver(self.arenas[idx][0])
                arena = SharedArena(driver, device, (num_frames, frame_bytes), self.arenas[idx], self.token)
                draw(arena.frames, idx * num_frames, seed, std)
                torch.cuda.synchronize()
                self._held.append(arena)


def draw(frames: torch.Tensor, first_frame: int, seed: int, std: float) -> None:
    """N(0, std^2) as bf16 into (frames, frame_bytes) uint8; the same for a frame number wherever it lies."""
    for start in range(0, len(frames), BLOCK_FRAMES):
        generator = torch.Generator(device=frames.device).manual_seed(seed * 1_000_003 + first_frame + start)
        frames[start : start + BLOCK_FRAMES].view(torch.bfloat16).normal_(0.0, std, generator=generator)
