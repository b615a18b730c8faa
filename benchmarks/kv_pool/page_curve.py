"""Attention time against page size, at the true strides of a full model in a full pool."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.bench_attention import KINDS
from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import replay_us
from benchmarks.kv_pool.cache_attention import SEED, CacheAttention, geometry_of
from benchmarks.report import Report
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kv_frames.cache import PagedCache

CONTEXTS = (1024, 4096, 32768, 131072, 1048576)
PAGE_SIZES = {
    "gqa": (16, 64, 128, 192, 256, 512, 1024),
    "mla": (16, 64, 112, 224, 256, 448, 896),
    "mla16": (16, 64, 128, 200, 256, 592, 904),
}
"""Powers of two, and sizes that fill the frames of these models by 95 % and more."""

ROUNDS = 3


def page_curve(report: Report, kernels: DeviceKernels, arena: torch.Tensor, kind: str) -> None:
    """arena: (frames, frame_bytes) uint8, seeded, nearly the whole GPU. Each sequence's frames are spread all over it.

    Sizes take turns, and the lowest median counts. A context that does not fit with a size's unused room is left out.
    """
    spec = full_spec(KINDS[kind])
    attention_spec = spec.layers[-1].attention
    order = torch.randperm(len(arena) - 1, generator=torch.Generator().manual_seed(SEED)).to(torch.int32) + 1
    for page_tokens in PAGE_SIZES[kind]:
        geometry = geometry_of(attention_spec, spec.num_layers, page_tokens)
        report.metric(f"page_fill.{kind}.{page_tokens}", geometry.fill, limit=1.0, note="of frames, by tokens")
    for context in CONTEXTS:
        attention = CacheAttention(kernels, attention_spec, context)
        found: dict[int, list[float]] = {}
        for _ in range(ROUNDS):
            for page_tokens in PAGE_SIZES[kind]:
                geometry = geometry_of(attention_spec, spec.num_layers, page_tokens)
                pages = geometry.num_pages(context)
                count = pages * geometry.frames_per_page
                if count > len(order):
                    continue
                table = order[:count].view(1, pages, -1).contiguous().cuda()
                cache = PagedCache(frames=arena, frame_table=table, geometry=geometry)
                work = attention.layers(cache, spec.num_layers, spec.num_layers)
                times = replay_us(work, units=spec.num_layers, replays=6 if context > 500_000 else 12, warm_up_s=0.06)
                found.setdefault(page_tokens, []).append(float(np.median(times)))
        best = min(min(times) for times in found.values())
        for page_tokens, times in found.items():
            name = f"page_tokens_us.{kind}.{context // 1024}k.{page_tokens}"
            report.metric(name, min(times), limit=best, note="a layer; the best size")
        shown = ", ".join(f"{size}: {min(times):.2f} ({min(times) / best:.3f}x)" for size, times in found.items())
        print(f"{kind} {context // 1024}k: {shown}", flush=True)
