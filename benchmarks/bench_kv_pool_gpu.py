"""What the backing of KV frames costs on one GPU, which page size attention wants, and how much one request can take.

    python -m benchmarks.bench_kv_pool_gpu [--out DIRECTORY] [--only backings,mapping,pages,one_request]

backings: decode attention over the same contents as an arena of shuffled frames, as frames mapped into a range
(`kv_pool/backing/vmm.py`), and as one tensor a layer; outputs must be equal bit for bit. mapping: gaps between replayed
steps of attention while pages are mapped and unmapped beside them, and while they are not, in turns. pages: attention
time against page size (`page_curve.py`). one_request: one sequence that holds the whole pool (`one_request.py`).
"""

from __future__ import annotations

import argparse
import threading
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_attention import KINDS
from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import guarded, replay_us, seeded_cache, write_failures
from benchmarks.kv_pool.cache_attention import (
    FRAME_BYTES,
    SEED,
    CacheAttention,
    MappedCache,
    geometry_of,
    in_one_piece,
    spread_cache,
)
from benchmarks.kv_pool.one_request import one_request
from benchmarks.kv_pool.page_curve import page_curve
from benchmarks.kv_pool.step_gaps import paired_gaps, step_graph
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.kv_frames.vmm import CudaVmmDriver
from crosspool.kv_pool.backing.vmm import VmmBacking
from crosspool.kv_pool.pool import KVPool
from crosspool.units import GiB, MiB, ceil_div

ROTATE_BYTES = 400 * MiB
CONTEXTS = (4096, 32768, 131072, 1048576)
ROUNDS = 5
POOL_FRAMES = 52 * GiB // FRAME_BYTES
"""Of each backing: as in a deployment, a sequence's frames lie all over a large pool. Both fit one GPU at once."""

NUM_GAPS, NUM_ROUNDS = 10_000, 10
"""Gaps with mapping and as many without, in rounds of both; which of them comes first changes from round to round."""

MAPPING_CONTEXT = 49152
LEFT_FREE_BYTES = 5 * GiB
"""Of the GPU, for kernels, scratch and the check of the one request."""


def backings(report: Report, kernels: DeviceKernels, kind: str) -> None:
    spec = full_spec(KINDS[kind]).layers[-1].attention
    worst = {"vmm_over_arena": 0.0, "arena_over_contiguous": 0.0, "vmm_over_contiguous": 0.0}
    for context in CONTEXTS:
        layers = max(4, min(48, ceil_div(ROTATE_BYTES, context * spec.kv_elements_per_token * 2)))
        attention = CacheAttention(kernels, spec, context)
        arena = spread_cache(geometry_of(spec, layers), context, POOL_FRAMES)
        mapped = MappedCache(arena)
        caches = {"arena": arena, "vmm": mapped.cache, "contiguous": in_one_piece(arena)}
        outputs = {name: attention.outputs(cache, layers - 1) for name, cache in caches.items()}
        assert torch.equal(outputs["arena"], outputs["vmm"]), f"vmm differs from arena at {context}"
        assert torch.equal(outputs["arena"], outputs["contiguous"]), f"contiguous differs from arena at {context}"
        times: dict[str, list[float]] = {name: [] for name in caches}
        units = max(layers, 8)
        for _ in range(ROUNDS):
            for name, cache in caches.items():
                work = attention.layers(cache, units, layers)
                times[name].append(float(np.median(replay_us(work, units=units, replays=30, warm_up_s=0.1))))
        medians = {name: float(np.median(found)) for name, found in times.items()}
        for name, us in medians.items():
            report.metric(f"backing_us.{kind}.{context // 1024}k.{name}", us)
        for pair in worst:
            upper, lower = pair.split("_over_")
            worst[pair] = max(worst[pair], medians[upper] / medians[lower])
        print(kind, context, medians, flush=True)
        mapped.close()
        del caches, cache, work, arena, mapped
        torch.cuda.empty_cache()
    report.metric(f"vmm_over_arena.{kind}", worst["vmm_over_arena"], limit=1.0, note="worst context; asked for: 1.02")
    for pair in ("arena_over_contiguous", "vmm_over_contiguous"):
        report.metric(f"{pair}.{kind}", worst[pair], limit=1.0, note="worst context; asked for: 1.03")


def mapping_beside_steps(report: Report, kernels: DeviceKernels, num_gaps: int = NUM_GAPS) -> None:
    """A/B/A/B: the tail of gaps between steps of a whole model's attention, with and without pages mapped beside them.

    A step is all layers of Qwen3-30B-A3B, each over its own cache; what the FFN adds would only hide what mapping does.
    """
    model = full_spec(KINDS["gqa"])
    spec, layers = model.layers[-1].attention, model.num_layers
    mapped = MappedCache(seeded_cache(geometry_of(spec, layers), 1, MAPPING_CONTEXT, SEED))
    spare = VmmBacking(CudaVmmDriver(0), 12 * 64 + 1, FRAME_BYTES)
    spare.add_model("other", 12)
    graph = step_graph(CacheAttention(kernels, spec, MAPPING_CONTEXT), mapped.cache)
    before = spare.counts()
    gaps = paired_gaps(graph, partial(_map_and_unmap, spare), num_gaps, NUM_ROUNDS)
    after = spare.counts()
    num_mapped, num_unmapped = after.maps - before.maps, after.unmaps - before.unmaps
    report.samples("step_gap_us.quiet", gaps.quiet_us, note=f"{layers} layers of attention at {MAPPING_CONTEXT} tokens")
    report.samples("step_gap_us.mapping", gaps.beside_us)
    report.metric("pages_mapped_beside_steps", num_mapped)
    report.metric("pages_unmapped_beside_steps", num_unmapped)
    report.metric("mapped_gib_per_s_beside_steps", num_mapped * 12 * FRAME_BYTES / GiB / gaps.beside_s)
    gaps.report_overhead(report, "map_p99_tbt_overhead", "asked for: 3; of all gaps of each kind")
    print(num_mapped, num_unmapped, spare.counts(), flush=True)
    mapped.close()
    spare.close()


def _map_and_unmap(backing: VmmBacking, stop: threading.Event) -> None:
    """A page of twelve frames every two milliseconds, as a busy pool moves them: over 10 GiB/s.

    Pages are made of other frames in every round, so that each is unmapped before its frames are mapped anew.
    """
    turn = 0
    while not stop.is_set():
        pages = [tuple(1 + (first + turn + frame) % 768 for frame in range(12)) for first in range(0, 768, 12)]
        for page in pages:
            backing.expect("other", [page])
            if stop.wait(0.002):
                break
        backing.give_back("other", pages)
        turn += 1


def nearly_all(left_free_bytes: int = LEFT_FREE_BYTES) -> torch.Tensor:
    """(frames, frame_bytes) uint8: N(0, 1) as bf16, all of the GPU but what is to be left free."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    arena = torch.empty((free - left_free_bytes) // FRAME_BYTES, FRAME_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    arena.normal_(generator=torch.Generator(device="cuda").manual_seed(SEED))
    torch.cuda.synchronize()
    print(f"an arena of {len(arena) * FRAME_BYTES / GiB:.1f} GiB", flush=True)
    return arena.view(torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="backings,mapping,pages,one_request")
    parser.add_argument("--gaps", type=int, default=NUM_GAPS, help="between steps, with mapping and as many without")
    options = parser.parse_args()
    chosen = options.only.split(",")
    kernels = DeviceKernels(torch.device("cuda"))
    failures: dict[str, str] = {}

    def report_of(what: str, summary: str) -> Report:
        config = {"frame_bytes": FRAME_BYTES, "dtype": "bf16"}
        return Report(what, hardware="h200", config=config, seed=SEED, summary=summary)

    if "backings" in chosen or "mapping" in chosen:
        report = report_of("kv_pool", "Frames as an arena, mapped, and without pages; mapping beside steps.")
        for kind in ("gqa", "mla") if "backings" in chosen else ():
            guarded(f"backings {kind}", partial(backings, report, kernels, kind), failures)
        if "mapping" in chosen:
            guarded("mapping", partial(mapping_beside_steps, report, kernels, options.gaps), failures)
        report.write(options.out)
    if "pages" in chosen or "one_request" in chosen:
        arena = nearly_all()
        if "pages" in chosen:
            report = report_of("page_tokens", "Decode attention against page size, frames spread over a full pool.")
            for kind in KINDS:
                guarded(f"pages {kind}", partial(page_curve, report, kernels, arena, kind), failures)
            report.write(options.out)
        if "one_request" in chosen:
            report = report_of("one_request", "One request that takes every page of a pool, model after model.")
            pool = KVPool(len(arena))
            for kind in KINDS:
                guarded(f"one request {kind}", partial(one_request, report, kernels, arena, pool, kind), failures)
            report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
