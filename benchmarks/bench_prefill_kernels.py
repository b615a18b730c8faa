"""How fast are a prompt's pieces on one GPU: attention by context, projections, experts; and beside decode's kernels?

    python -m benchmarks.bench_prefill_kernels [--out DIRECTORY] [--models a,b] [--tokens 64,1024,2048,4096,8192]
        [--no-tiles]

One layer of the full-size models with seeded random weights and a seeded cache. Limits are operations at the rate of a
large bf16 product, measured here, and for experts the bytes of all of them where that takes longer. `library`: torch's
own attention over contiguous keys, for comparison; left out, as the other tiles are, with --no-tiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.chunks.chunk_half import ChunkHalf
from crosspool.backends.cuda.chunks.chunk_plan import chunk_plan, padded_rows
from crosspool.backends.cuda.chunks.chunk_rows import ChunkRows
from crosspool.backends.cuda.chunks.prefill_attention import gqa_attention, mla_attention
from crosspool.backends.cuda.chunks.prefill_blocks import Stretch, expanded_rounds, frame_round
from crosspool.backends.cuda.chunks.prefill_piece import DeviceRound, Library, PieceAttention
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kernels.prefill_shapes import EXPANDED_KEYS, Tile, tile_of
from crosspool.backends.cuda.loading.weights import random_attention_weights, random_ffn_weights
from crosspool.kv_pool.geometry import page_geometry
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec
from crosspool.units import MiB

SEED = 7
PAGE_TOKENS = 256
READ_TB_PER_S = 4.25
TILES = (Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 4, 3))


def time_us(work: Callable[[], object], repeats: int = 10) -> float:
    """Median of `repeats` runs, launches included where they are slower than the GPU."""
    work()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in events)
    return float(times[len(times) // 2])


def show_kernels(work: Callable[[], object]) -> float:
    """What the GPU does; returns microseconds that the host takes to launch it."""
    taken_us = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            work()
        taken_us.append((time.perf_counter() - begin) * 2e5)
    torch.cuda.synchronize()
    host_us = sorted(taken_us)[len(taken_us) // 2]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events)
    print(f"    host {host_us:.0f} us, device {total:.0f} us", flush=True)
    for event in events[:9]:
        print(f"    {event.device_time_total:8.1f} us {event.count:3d} x {event.key[:70]}", flush=True)
    return host_us


def product_tflops() -> float:
    """bf16 products of random 8192 x 8192 matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    for _ in range(30):
        torch.mm(a, b)
    return 2 * 8192**3 / time_us(lambda: torch.mm(a, b)) / 1e6


class Layer:
    """The last layer of a model and a sequence of `room` cached tokens."""

    def __init__(self, kernels: DeviceKernels, name: str, room: int) -> None:
        self.kernels, self.name = kernels, name
        self.spec: ModelSpec = full_spec(name, 1)
        device = kernels.device
        self.attention = random_attention_weights(replace(self.spec, vocab_size=1024), SEED, device)
        self.geometry = page_geometry(
            self.spec, page_tokens=PAGE_TOKENS, frame_bytes=2 * MiB, kv_dtype="bfloat16", model=name
        )
        pages = self.geometry.num_pages(room)
        frames = pages * self.geometry.frames_per_page
        generator = torch.Generator(device=device).manual_seed(SEED)
        arena = torch.empty(frames + 1, MiB, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        self.arena = arena.view(torch.uint8)
        order = np.random.default_rng(SEED).permutation(frames) + 1
        self.table = order.reshape(self.geometry.frames_per_page, pages).astype(np.int64)

    def half(self, tokens: int, cached: int) -> tuple[ChunkHalf, Any]:
        plan = chunk_plan(tokens, 1, 1, tokens)
        batch = ChunkRows(
            token_ids=np.arange(tokens) % 1000,
            positions=np.arange(cached, cached + tokens),
            row_of_token=np.zeros(tokens, dtype=np.int64),
            tables=[self.table],
        )
        spec = replace(self.spec, vocab_size=1024)
        half = ChunkHalf(self.kernels, spec, self.attention, self.arena, self.geometry, batch, plan)
        half.embed()
        return half, plan.pieces[0]


def attention_flops(spec: GQASpec | MLASpec, tokens: int, cached: int) -> float:
    """Products of scores and values that causal attention needs."""
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    dims = spec.qk_head_dim + spec.v_head_dim if isinstance(spec, MLASpec) else 2 * spec.head_dim
    return 2.0 * pairs * spec.num_heads * dims


class Bench:
    def __init__(self, report: Report, kernels: DeviceKernels, tflops: float) -> None:
        self.report, self.kernels, self.tflops = report, kernels, tflops

    def attention(self, layer: Layer, tokens: int, cached: int) -> None:
        """The kernel's cuts, and the library's."""
        spec, device = layer.spec.layers[0].attention, self.kernels.device
        half, _ = layer.half(tokens, cached)
        cache = half.cache
        dim = spec.qk_head_dim if isinstance(spec, MLASpec) else spec.head_dim
        q = torch.randn(tokens, spec.num_heads, dim, device=device).bfloat16()
        flops = attention_flops(spec, tokens, cached)
        limit = flops / self.tflops / 1e6
        weights: Any = layer.attention.layers[0].attention
        stretch = [Stretch(0, tokens, cached, 0)]
        for tile in dict.fromkeys((tile_of(spec), *TILES)):

            def run(tile: Tile = tile) -> None:
                if isinstance(spec, MLASpec):
                    rounds = expanded_rounds(stretch, tile.rows, EXPANDED_KEYS)
                else:
                    rounds = [frame_round(stretch, tile.rows)]
                piece = PieceAttention((), tuple(DeviceRound.of(part, device) for part in rounds))

                def work() -> None:
                    if isinstance(spec, MLASpec):
                        mla_attention(self.kernels, spec, weights, q, tokens, cache, 0, piece, Library(), tile)
                    else:
                        gqa_attention(self.kernels, spec, q, tokens, cache, 0, piece, None, Library(), tile)

                us = time_us(work)
                label = f"{tile.rows}x{tile.keys}.w{tile.warps}.s{tile.stages}"
                name = f"attention_us.{layer.name}.t{tokens}.c{cached}.{label}"
                self.report.metric(name, us, limit=limit)
                print(f"{name}: {us:.0f} us, {flops / us / 1e6:.0f} TFLOP/s", flush=True)

            guarded(f"attention {layer.name} {tile}", run, FAILURES)

    def library(self, layer: Layer, tokens: int, cached: int) -> None:
        """torch's attention without a mask, over contiguous keys of every head: what a merged prefix would cost."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        spec, device = layer.spec.layers[0].attention, self.kernels.device
        dims = (spec.qk_head_dim, spec.v_head_dim) if isinstance(spec, MLASpec) else (spec.head_dim, spec.head_dim)
        kv_heads = spec.num_heads if isinstance(spec, MLASpec) else spec.num_kv_heads
        q = torch.randn(1, spec.num_heads, tokens, dims[0], device=device).bfloat16()
        k = torch.randn(1, kv_heads, cached, dims[0], device=device).bfloat16()
        v = torch.randn(1, kv_heads, cached, dims[1], device=device).bfloat16()
        flops = 2.0 * tokens * cached * spec.num_heads * sum(dims)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

            def run(backend: Any = backend) -> None:
                with sdpa_kernel(backend):
                    us = time_us(
                        lambda: torch.nn.functional.scaled_dot_product_attention(
                            q, k, v, scale=spec.softmax_scale, enable_gqa=kv_heads != spec.num_heads
                        )
                    )
                name = f"library_us.{layer.name}.t{tokens}.k{cached}.{backend.name.lower()}"
                self.report.metric(name, us, limit=flops / self.tflops / 1e6)
                print(f"{name}: {us:.0f} us, {flops / us / 1e6:.0f} TFLOP/s", flush=True)

            guarded(f"library {layer.name} {backend.name}", run, FAILURES)

    def half(self, layer: Layer, tokens: int, cached: int) -> None:
        """All of attention's side of a piece."""
        half, piece = layer.half(tokens, cached)
        us = time_us(lambda: half.attend(0, piece))
        flops = attention_flops(layer.spec.layers[0].attention, tokens, cached)
        flops += 2.0 * tokens * matrix_elements(layer.attention.layers[0].attention)
        label = f"{layer.name}.t{tokens}.c{cached}"
        self.share(f"half_us.{label}", us, flops, 0.0)
        sums = [torch.zeros(tokens, layer.spec.hidden_size, device=self.kernels.device)]
        add = time_us(lambda: half.add(0, piece, sums))
        self.report.metric(f"add_us.{label}", add)
        if cached in (0, 30720):
            self.host(f"{layer.name}.t{tokens}.c{cached}.attend", lambda: half.attend(0, piece))

    def ffn(self, layer: Layer, ffn: ChunkFFN, tokens: int) -> None:
        rows = padded_rows(tokens)
        x = torch.randn(rows, layer.spec.hidden_size, device=self.kernels.device).bfloat16()
        out = torch.empty(tokens, layer.spec.hidden_size, device=self.kernels.device)
        us = time_us(lambda: ffn.run(0, x, out))
        weights = ffn.layers[0]
        spec: Any = weights.spec
        active = 3 * (spec.top_k * weights.width + weights.shared_width) * layer.spec.hidden_size
        chosen = spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** tokens)
        read = 6.0 * (chosen * weights.width + weights.shared_width) * layer.spec.hidden_size
        self.share(f"ffn_us.{layer.name}.t{tokens}", us, 2.0 * tokens * active, read)
        if tokens in (64, 2048):
            self.host(f"{layer.name}.t{tokens}.ffn", lambda: ffn.run(0, x, out))

    def host(self, name: str, work: Callable[[], object]) -> None:
        self.report.metric(f"host_us.{name}", show_kernels(work), note="to launch it, nothing before it on the GPU")

    def share(self, name: str, us: float, flops: float, num_bytes: float) -> None:
        """A time beside its limit, and the part of the matrix peak that it reaches."""
        limit = max(flops / self.tflops / 1e6, num_bytes / READ_TB_PER_S / 1e6)
        self.report.metric(name, us, limit=limit, note="products at the rate of a large one, or bytes at 4.25 TB/s")
        self.report.metric(f"matrix_share.{name.replace('_us', '', 1)}", flops / us / 1e6 / self.tflops, limit=1.0)
        print(f"{name}: {us:.0f} us, {flops / us / 1e6:.0f} TFLOP/s, limit {limit:.0f} us", flush=True)


def matrix_elements(weights: Any) -> int:
    """Of an attention layer's projections."""
    found = (getattr(weights, field.name) for field in fields(weights))
    return sum(each.numel() for each in found if isinstance(each, torch.Tensor) and each.ndim > 1)


FAILURES: dict[str, str] = {}


def measure(bench: Bench, name: str, sizes: list[int], *, has_tiles: bool) -> None:
    layer = Layer(bench.kernels, name, 40960)
    ffn = ChunkFFN(bench.kernels, random_ffn_weights(layer.spec, SEED, bench.kernels.device))
    for tokens in sizes:
        guarded(f"ffn {name} {tokens}", partial(bench.ffn, layer, ffn, tokens), FAILURES)
    for tokens in sizes:
        guarded(f"half {name} {tokens}", partial(bench.half, layer, tokens, 0), FAILURES)
    for cached in (2048, 30720):
        guarded(f"half {name} {cached}", partial(bench.half, layer, 2048, cached), FAILURES)
    for cached in (2048, 30720) if has_tiles else ():
        bench.attention(layer, 2048, cached)
        bench.library(layer, 2048, cached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--tokens", default="64,256,1024,2048,4096,8192")
    parser.add_argument("--no-tiles", action="store_true")
    parser.add_argument("--name", default="prefill_kernels", help="of the result")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    kernels = DeviceKernels(torch.device("cuda", 0))
    tflops = product_tflops()
    print(f"product: {tflops:.0f} TFLOP/s", flush=True)
    config = {"models": options.models, "tokens": options.tokens}
    report = Report(options.name, hardware="h200", config=config, seed=SEED)
    report.metric("product_tflops", tflops)
    bench = Bench(report, kernels, tflops)
    for name in options.models.split(","):
        measure(bench, name, [int(tokens) for tokens in options.tokens.split(",")], has_tiles=not options.no_tiles)
        torch.cuda.empty_cache()
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "partial.json").write_text(json.dumps(report.metrics, indent=1), encoding="utf-8")
    report.write(options.out)
    write_failures(FAILURES, options.out)


if __name__ == "__main__":
    main()
