"""What a GPU's KV costs on its way to host memory and back, and what decode beside it feels.

    python -m benchmarks.bench_host_tier_gpu [--out DIRECTORY] [--gaps N]

Pages of Qwen3-30B-A3B, twelve frames each, from all over a pool, are stowed and brought back by the KV rank's own host
frames (`backends/cuda/kv_frames/host_frames.py`): bandwidth, what enqueuing takes of the thread that also runs decode,
and that contents are the same. Then gaps between replayed steps of attention while pages move beside them, and while
none do.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_attention import KINDS
from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import guarded, seeded_cache, warm_up, write_failures
from benchmarks.kv_pool.cache_attention import FRAME_BYTES, SEED, CacheAttention, geometry_of
from benchmarks.kv_pool.step_gaps import PairedGaps, gaps_us, step_graph
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kv_frames.copy_order import MAX_COPIES
from crosspool.backends.cuda.kv_frames.host_frames import HostFrames, make_host_frames
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.units import GiB

PCIE_GB_PER_S = 55.0
"""Pinned host memory to an H200, one direction, measured (`cudaMemcpy`)."""

FRAMES_PER_PAGE, PAGE_TOKENS = 12, 256
POOL_FRAMES = 16 * GiB // FRAME_BYTES
NUM_PAGES = 128
"""That move at once: a conversation of 32K tokens, 3 GiB."""

ROUNDS = 7
STEP_CONTEXT = 4096
NUM_GAPS, NUM_ROUNDS = 10_000, 10
MAX_UNDER_WAY = 6
"""Batches of pages, beyond which a step begins no more."""


class Tier:
    """A pool's arena, host frames for `NUM_PAGES` pages, and pages of frames all over both."""

    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        self.arena = torch.empty(POOL_FRAMES, FRAME_BYTES, dtype=torch.uint8, device=device)
        self.arena.random_(0, 256, generator=torch.Generator(device=device).manual_seed(SEED))
        torch.cuda.synchronize()
        num_host_frames = NUM_PAGES * FRAMES_PER_PAGE + 1
        begin_s = time.perf_counter()
        self.frames: HostFrames = make_host_frames(
            Site("kv0", device, Driver("kv0"), {"kv0": 0}, None), self.arena, num_host_frames, 0
        )
        self.pin_s_per_gib = (time.perf_counter() - begin_s) / (self.frames.num_bytes / GiB)
        self.num_moved = 0
        rng = np.random.default_rng(SEED)
        self.own = _pages(rng.permutation(np.arange(1, POOL_FRAMES)))
        self.host = _pages(rng.permutation(np.arange(1, num_host_frames)))

    def stow(self, count: int = NUM_PAGES, first: int = 0) -> list[FrameCopy]:
        pages = range(first, first + count)
        return [FrameCopy(self.own[page], self.host[page], is_stowed=True) for page in pages]

    def bring_back(self, into: int, count: int = NUM_PAGES, first: int = 0) -> list[FrameCopy]:
        """into: number of the first page of the pool that is filled."""
        pages = range(first, first + count)
        return [FrameCopy(self.own[into + page], self.host[page], is_stowed=False) for page in pages]

    def move(self) -> None:
        """One more page goes out while another one comes back, unless so many do already."""
        if self.frames.num_under_way > MAX_UNDER_WAY:
            return
        page = self.num_moved % (NUM_PAGES // 2)
        self.frames.copy([*self.stow(1, page), *self.bring_back(NUM_PAGES, 1, NUM_PAGES // 2 + page)])
        self.num_moved += 1

    def until_ended(self) -> None:
        while self.frames.num_under_way:
            time.sleep(1e-5)


def _pages(frames: np.ndarray) -> list[tuple[int, ...]]:
    whole = frames[: len(frames) // FRAMES_PER_PAGE * FRAMES_PER_PAGE].reshape(-1, FRAMES_PER_PAGE)
    return [tuple(page) for page in whole.tolist()]


def copies(report: Report, tier: Tier) -> None:
    """A whole conversation out and back into other frames, which must hold the same then."""
    num_bytes = NUM_PAGES * FRAMES_PER_PAGE * FRAME_BYTES
    times: dict[str, list[float]] = {"stow": [], "bring_back": []}
    enqueue_us: list[float] = []
    for _ in range(ROUNDS):
        for what, moved in (("stow", tier.stow()), ("bring_back", tier.bring_back(NUM_PAGES))):
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            tier.frames.copy(moved)
            enqueue_us.append(1e6 * (time.perf_counter() - begin_s))
            tier.until_ended()
            times[what].append(time.perf_counter() - begin_s)
        came = [frame for page in tier.own[NUM_PAGES : 2 * NUM_PAGES] for frame in page]
        went = [frame for page in tier.own[:NUM_PAGES] for frame in page]
        for first in range(0, len(went), 96):
            pair = tier.arena[came[first : first + 96]], tier.arena[went[first : first + 96]]
            assert torch.equal(*pair), "what came back is not what went"
    note = f"{NUM_PAGES} pages of {FRAMES_PER_PAGE} frames all over a pool of {POOL_FRAMES * FRAME_BYTES // GiB} GiB"
    for what, found in times.items():
        report.metric(f"{what}_gb_per_s", num_bytes / 1e9 / float(np.median(found)), limit=PCIE_GB_PER_S, note=note)
        report.metric(f"{what}_ms.qwen3-30b-a3b.32k", 1e3 * float(np.median(found)))
    note = f"of the thread that runs steps: a message of {NUM_PAGES} pages, and its first {MAX_COPIES} copies"
    report.metric("enqueue_us", float(np.median(enqueue_us)), note=note)
    report.metric("pin_s_per_gib", tier.pin_s_per_gib, note="once, at the rank's start")
    print({what: np.round(found, 4).tolist() for what, found in times.items()}, np.round(enqueue_us, 2), flush=True)


def beside_steps(report: Report, kernels: DeviceKernels, tier: Tier, num_gaps: int) -> None:
    """Steps of all layers of Qwen3-30B-A3B's attention, each over its own cache; the same thread begins the copies."""
    model = full_spec(KINDS["gqa"])
    spec, layers = model.layers[-1].attention, model.num_layers
    cache = seeded_cache(geometry_of(spec, layers), 1, STEP_CONTEXT, SEED)
    graph = step_graph(CacheAttention(kernels, spec, STEP_CONTEXT), cache)
    warm_up(graph.replay)
    gaps = PairedGaps()
    num_before = tier.num_moved
    for number in range(NUM_ROUNDS):
        found: dict[bool, list[float]] = {}
        for is_copying in (False, True) if number % 2 == 0 else (True, False):
            begin_s = time.perf_counter()
            found[is_copying] = gaps_us(graph, num_gaps // NUM_ROUNDS, tier.move if is_copying else None)
            gaps.beside_s += time.perf_counter() - begin_s if is_copying else 0.0
            tier.until_ended()
        gaps.add_round(found[False], found[True])
    report.samples("step_gap_us.quiet", gaps.quiet_us, note=f"{layers} layers at {STEP_CONTEXT} tokens")
    report.samples("step_gap_us.copying", gaps.beside_us, note="a page goes out and another comes back with every step")
    rate = 2 * (tier.num_moved - num_before) * FRAMES_PER_PAGE * FRAME_BYTES / 1e9 / gaps.beside_s
    report.metric("copied_gb_per_s_beside_steps", rate, limit=2 * PCIE_GB_PER_S, note="both directions together")
    gaps.report_overhead(report, "host_tier_p99_tbt_overhead", "of all gaps of each kind")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--gaps", type=int, default=NUM_GAPS, help="between steps, with copies and as many without")
    options = parser.parse_args()
    kernels = DeviceKernels(torch.device("cuda"))
    config = {"frame_bytes": FRAME_BYTES, "pool_frames": POOL_FRAMES, "page_tokens": PAGE_TOKENS}
    report = Report("host_tier", hardware="h200", config=config, seed=SEED)
    report.summary = "Cached KV to pinned host memory and back, and decode beside it."
    failures: dict[str, str] = {}
    tier = Tier()
    guarded("copies", partial(copies, report, tier), failures)
    guarded("beside steps", partial(beside_steps, report, kernels, tier, options.gaps), failures)
    print(report.as_markdown(), flush=True)
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
