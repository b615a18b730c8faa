"""What the backing of KV frames costs on one GPU, and how much one request can take of it.

    python -m benchmarks.bench_kv_pool_gpu [--out DIRECTORY] [--only backings,pages,mapping,one_request]

backings: decode attention over the same contents as an arena of shuffled frames, as frames mapped into a range
(`kv_pool/backing/vmm.py`), and as one tensor in order; outputs must be equal bit for bit. pages: attention time against
page size. mapping: gaps between replayed steps of attention while pages are mapped and unmapped beside them, and while
they are not, in turns. one_request: one sequence that holds the whole pool, checked against attention in pieces.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_attention import KINDS, projections
from benchmarks.full_models import full_spec
from benchmarks.gpu_timing import guarded, replay_us, seeded_cache, write_failures
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.attention import AttentionScratch, attention_decode
from crosspool.backends.cuda.attention_variants import key_value_dims, num_splits
from crosspool.backends.cuda.cache import PagedCache
from crosspool.backends.cuda.launch import DeviceKernels
from crosspool.backends.cuda.rope import RopeTable, rope_cache
from crosspool.backends.cuda.vmm import CudaVmmDriver, RangeMemory
from crosspool.kv_pool.backing.vmm import VmmBacking
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, MLASpec
from crosspool.units import GiB, MiB, ceil_div

SEED = 11
FRAME_BYTES = 2 * MiB
ROTATE_BYTES = 400 * MiB
CONTEXTS = (4096, 32768, 131072)
PAGE_SIZES = (16, 64, 128, 256, 512, 1024)
ROUNDS = 5
NUM_GAPS = 20_000
LEFT_FREE_BYTES = 6 * GiB
"""Of the GPU, for kernels, scratch and the check of the one request."""


def geometry_of(spec: GQASpec | MLASpec, layers: int, page_tokens: int = 256) -> PageGeometry:
    return PageGeometry(
        num_layers=layers,
        elements_per_token_layer=spec.kv_elements_per_token,
        element_bytes=2,
        page_tokens=page_tokens,
        frame_bytes=FRAME_BYTES,
    )


@dataclass
class Attention:
    """Decode attention of one sequence over a cache, layer after layer."""

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
        self.splits = num_splits(self.spec, 1, self.kernels.num_sms)
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
        self.run(cache, layer)
        torch.cuda.synchronize()
        return self.out.clone()


class MappedCache:
    """The contents of a cache in frames that are mapped into one range. Close it after its last use."""

    def __init__(self, source: PagedCache, device: int = 0) -> None:
        num_frames, geometry = len(source.frames), source.geometry
        self.backing = VmmBacking(CudaVmmDriver(device), num_frames, FRAME_BYTES)
        found = self.backing.add_model("model", geometry.frames_per_page)
        memory = torch.as_tensor(RangeMemory(found), device="cuda")
        table = source.frame_table.cpu().numpy()
        places = np.zeros_like(table)
        for row, pages in enumerate(table.tolist()):
            places[row] = self.backing.place("model", row, [tuple(page) for page in pages], is_decode=False)
        for source_page, place in zip(table.reshape(-1), places.reshape(-1), strict=True):
            memory[int(place)].copy_(source.frames[int(source_page)])
        self.cache = replace(source, frames=memory, frame_table=torch.from_numpy(places).cuda())

    def close(self) -> None:
        torch.cuda.synchronize()
        self.backing.close()


def in_order(source: PagedCache) -> PagedCache:
    """The same contents, all frames in the order in which attention reads them."""
    order = source.frame_table.reshape(-1).long()
    frames = torch.cat([source.frames[:1], source.frames[order]])
    table = torch.arange(1, len(order) + 1, dtype=torch.int32, device="cuda").view_as(source.frame_table)
    return replace(source, frames=frames, frame_table=table.contiguous())


def backings(report: Report, kernels: DeviceKernels, kind: str) -> None:
    spec = full_spec(KINDS[kind]).layers[-1].attention
    worst = {"vmm_over_arena": 0.0, "arena_over_contiguous": 0.0, "vmm_over_contiguous": 0.0}
    for context in CONTEXTS:
        layers = max(1, min(48, ceil_div(ROTATE_BYTES, context * spec.kv_elements_per_token * 2)))
        attention = Attention(kernels, spec, context)
        arena = seeded_cache(geometry_of(spec, layers), 1, context, SEED)
        mapped = MappedCache(arena)
        caches = {"arena": arena, "vmm": mapped.cache, "contiguous": in_order(arena)}
        outputs = {name: attention.outputs(cache, layers - 1) for name, cache in caches.items()}
        assert torch.equal(outputs["arena"], outputs["vmm"]), f"vmm differs from arena at {context}"
        assert torch.equal(outputs["arena"], outputs["contiguous"]), f"contiguous differs from arena at {context}"
        times: dict[str, list[float]] = {name: [] for name in caches}
        units = max(layers, 8)
        for _ in range(ROUNDS):
            for name, cache in caches.items():
                work = _layers_of(attention, cache, units, layers)
                times[name].append(float(np.median(replay_us(work, units=units, replays=30))))
        medians = {name: float(np.median(found)) for name, found in times.items()}
        for name, us in medians.items():
            report.metric(f"backing_us.{kind}.{context // 1024}k.{name}", us)
        for pair in worst:
            upper, lower = pair.split("_over_")
            worst[pair] = max(worst[pair], medians[upper] / medians[lower])
        print(kind, context, medians, flush=True)
        mapped.close()
        del caches, arena, mapped
        torch.cuda.empty_cache()
    report.metric(f"vmm_over_arena.{kind}", worst["vmm_over_arena"], limit=1.0, note="asked for: 1.02")
    for pair in ("arena_over_contiguous", "vmm_over_contiguous"):
        report.metric(f"{pair}.{kind}", worst[pair], limit=1.0, note="asked for: 1.03")


def _layers_of(attention: Attention, cache: PagedCache, units: int, layers: int) -> Callable[[], None]:
    def work() -> None:
        for unit in range(units):
            attention.run(cache, unit % layers)

    return work


def page_sizes(report: Report, kernels: DeviceKernels, kind: str) -> None:
    spec = full_spec(KINDS[kind]).layers[-1].attention
    for context in (1024, 4096, 32768, 131072, 1048576):
        layers = max(1, min(16, ceil_div(ROTATE_BYTES, context * spec.kv_elements_per_token * 2)))
        attention = Attention(kernels, spec, context)
        for page_tokens in PAGE_SIZES:
            if page_tokens * spec.kv_elements_per_token * 2 > FRAME_BYTES:
                continue
            geometry = geometry_of(spec, layers, page_tokens)
            if geometry.num_pages(context) * geometry.page_bytes > 40 * GiB:
                continue
            cache = seeded_cache(geometry, 1, context, SEED)
            units = max(layers, 8)
            us = float(np.median(replay_us(_layers_of(attention, cache, units, layers), units=units, replays=20)))
            report.metric(f"page_tokens_us.{kind}.{context // 1024}k.{page_tokens}", us)
            print(kind, context, page_tokens, round(us, 2), flush=True)
            del cache
            torch.cuda.empty_cache()


def mapping_beside_steps(report: Report, kernels: DeviceKernels) -> None:
    """A/B/A/B: the tail of gaps between steps of 48 layers, with and without pages being mapped beside them."""
    spec = full_spec(KINDS["gqa"]).layers[-1].attention
    attention = Attention(kernels, spec, 32768)
    mapped = MappedCache(seeded_cache(geometry_of(spec, 8), 1, 32768, SEED))
    spare = VmmBacking(CudaVmmDriver(0), 12 * 64 + 1, FRAME_BYTES)
    spare.add_model("other", 12)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _layers_of(attention, mapped.cache, 48, 8)()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _layers_of(attention, mapped.cache, 48, 8)()
    gaps: dict[bool, list[float]] = {True: [], False: []}
    maps = 0
    for is_mapping in (False, True, False, True):
        stop = threading.Event()
        mapper = threading.Thread(target=_map_and_unmap, args=(spare, stop))
        if is_mapping:
            mapper.start()
        before = spare.counts().maps
        gaps[is_mapping] += _gaps_us(graph, NUM_GAPS // 2)
        stop.set()
        if is_mapping:
            mapper.join()
            maps += spare.counts().maps - before
    p99 = {is_mapping: float(np.percentile(found, 99)) for is_mapping, found in gaps.items()}
    report.samples("step_gap_us.quiet", gaps[False])
    report.samples("step_gap_us.mapping", gaps[True])
    report.metric("pages_mapped_beside_steps", maps)
    report.metric(
        "map_p99_tbt_overhead_percent",
        100 * (p99[True] / p99[False] - 1),
        limit=0.0,
        note="asked for: 3; of gaps above",
    )
    print(p99, maps, flush=True)
    mapped.close()
    spare.close()


def _gaps_us(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    found = []
    last_s = time.perf_counter()
    for _ in range(count):
        graph.replay()
        torch.cuda.synchronize()
        now_s = time.perf_counter()
        found.append(1e6 * (now_s - last_s))
        last_s = now_s
    return found


def _map_and_unmap(backing: VmmBacking, stop: threading.Event) -> None:
    """A page of twelve frames every two milliseconds, as a busy pool moves them: over 10 GiB/s."""
    pages = [tuple(range(first, first + 12)) for first in range(1, 12 * 64, 12)]
    while not stop.is_set():
        for page in pages:
            backing.expect("other", [page])
            if stop.wait(0.002):
                break
        backing.give_back("other", pages)


def one_request(report: Report, kernels: DeviceKernels, kind: str) -> None:
    """One sequence takes the whole pool; attention over it, in the first and the last layer, is checked in pieces."""
    name = KINDS[kind]
    spec = full_spec(name)
    attention_spec = spec.layers[-1].attention
    geometry = geometry_of(attention_spec, spec.num_layers)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    num_frames = (free - LEFT_FREE_BYTES) // FRAME_BYTES
    num_pages = (num_frames - 1) // geometry.frames_per_page
    tokens = num_pages * geometry.page_tokens
    cache = seeded_cache(geometry, 1, tokens, SEED)
    attention = Attention(kernels, attention_spec, tokens)
    worst = 0.0
    for layer in (0, spec.num_layers - 1):
        got = attention.outputs(cache, layer)[0].float()
        wanted = _reference(attention, cache, layer)
        worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max()))
    times = replay_us(_layers_of(attention, cache, spec.num_layers, spec.num_layers), units=1, replays=10)
    share = num_pages * geometry.frames_per_page / (num_frames - 1)
    assert worst < 0.02, f"attention over {tokens} tokens is wrong by {worst}"
    report.metric(f"one_request_tokens.{name}.1", tokens, note=f"{100 * share:.1f} % of the pool's frames")
    report.metric(f"one_request_share.{name}.1", share, limit=1.0, note="asked for: 0.95")
    report.metric(
        f"one_request_error.{name}.1", worst, note="largest difference from float32 in pieces; values are N(0, 1)"
    )
    report.samples(f"one_request_attention_us.{name}.1", times)
    print(name, tokens, share, worst, flush=True)


def _reference(attention: Attention, cache: PagedCache, layer: int) -> torch.Tensor:
    """(heads, value_dim) float32: softmax over all slots, page by page. The last slot was written by the kernel."""
    spec, geometry = attention.spec, cache.geometry
    key_dim, value_dim = key_value_dims(spec)
    query = query_of(attention, cache, layer)
    heads, most = spec.num_heads, torch.full((spec.num_heads, 1), -torch.inf, device="cuda")
    total, sums = torch.zeros(heads, 1, device="cuda"), torch.zeros(heads, value_dim, device="cuda")
    first = geometry.offset_of_layer(layer) // 2
    part = geometry.page_tokens * geometry.elements_per_token_layer
    frames = cache.frames.view(torch.bfloat16)
    for page in range(cache.frame_table.shape[1]):
        frame = int(cache.frame_table[0, page, geometry.frame_of_layer(layer)])
        rows = frames[frame, first : first + part].view(geometry.page_tokens, -1).float()
        if isinstance(spec, MLASpec):
            keys, values = rows[None, :, :key_dim], rows[None, :, :value_dim]
        else:
            split = rows.view(geometry.page_tokens, 2, spec.num_kv_heads, spec.head_dim)
            keys, values = split[:, 0].transpose(0, 1), split[:, 1].transpose(0, 1)
        group = heads // len(keys)
        scores = torch.einsum("hd,htd->ht", query, keys.repeat_interleave(group, 0)) * spec.softmax_scale
        peak = torch.maximum(most, scores.amax(1, keepdim=True))
        weights, scale = (scores - peak).exp(), (most - peak).exp()
        total = total * scale + weights.sum(1, keepdim=True)
        sums = sums * scale + torch.einsum("ht,htd->hd", weights, values.repeat_interleave(group, 0))
        most = peak
    return sums / total


def query_of(attention: Attention, cache: PagedCache, layer: int) -> torch.Tensor:
    """(heads, key_dim) float32: the normed, rotated query. Its own slot is written again, with the same values."""
    heads, (key_dim, _) = attention.spec.num_heads, key_value_dims(attention.spec)
    query = torch.empty(1, heads, key_dim, dtype=torch.bfloat16, device="cuda")
    rope_cache(attention.kernels, attention.spec, attention.inputs, cache, layer, attention.positions, query)
    torch.cuda.synchronize()
    return query[0].float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="backings,pages,mapping,one_request")
    options = parser.parse_args()
    chosen = options.only.split(",")
    kernels = DeviceKernels(torch.device("cuda"))
    failures: dict[str, str] = {}
    report = Report("kv_pool", hardware="h200", config={"frame_bytes": FRAME_BYTES, "dtype": "bf16"}, seed=SEED)
    report.summary = (
        "Frames as an arena, mapped, and in one piece; page sizes; mapping beside steps; one request alone."
    )
    for kind in ("gqa", "mla"):
        if "backings" in chosen:
            guarded(f"backings {kind}", lambda kind=kind: backings(report, kernels, kind), failures)  # type: ignore[misc]
    if "mapping" in chosen:
        guarded("mapping", lambda: mapping_beside_steps(report, kernels), failures)
    for kind in KINDS:
        if "one_request" in chosen:
            guarded(f"one request {kind}", lambda kind=kind: one_request(report, kernels, kind), failures)  # type: ignore[misc]
    for kind in ("gqa", "mla"):
        if "pages" in chosen:
            guarded(f"pages {kind}", lambda kind=kind: page_sizes(report, kernels, kind), failures)  # type: ignore[misc]
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
