"""Times GPU work by replaying CUDA graphs, and makes the caches that attention is timed on."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from crosspool.backends.cuda.kv_frames.cache import PagedCache
from crosspool.kv_pool.geometry import PageGeometry

COPY_BYTES = 4 << 30


def replay_us(
    work: Callable[[], None], *, units: int, replays: int = 60, warm_up_s: float = 0.2, budget_s: float | None = None
) -> list[float]:
    """Microseconds a unit took in each of `replays` replays of a graph of `work`, which does `units` of them.

    The caller rotates buffers, so that a unit's data has left L2 before it is used again. budget_s: what replays may
    take; long ones are fewer then, eight at least.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    if budget_s is not None:
        replays = min(replays, max(8, int(budget_s / _once_s(graph))))
    warm_up(graph.replay, warm_up_s, min(20, replays))
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / units for begin, end in events]


def _once_s(graph: torch.cuda.CUDAGraph) -> float:
    """Of one replay, launch included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def warm_up(work: Callable[[], object], seconds: float = 0.2, at_once: int = 20) -> None:
    """Bring the clocks up by the very work that is timed next, `at_once` of it without a wait between.

    An idle GPU runs at a fraction of its clocks. Large matrix products do not serve for this: they draw so much power
    that what follows them for a while runs at lower clocks.
    """
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(at_once):
            work()
        torch.cuda.synchronize()


def copy_tb_per_s() -> float:
    """Device-to-device copy bandwidth of this GPU, bytes read and written; launched, for a graph's copy is slower."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(COPY_BYTES / sorted(times)[len(times) // 2] / 1e9)


def seeded_cache(
    geometry: PageGeometry, rows: int, tokens: int, seed: int = 0, device: torch.device | None = None
) -> PagedCache:
    """A cache full of seeded values: `rows` sequences of `tokens` tokens, their frames in random order."""
    device = device or torch.device("cuda")
    generator = torch.Generator(device=device).manual_seed(seed)
    pages = geometry.num_pages(tokens)
    frames = rows * pages * geometry.frames_per_page
    arena = torch.empty(frames + 1, geometry.frame_bytes // 2, dtype=torch.bfloat16, device=device)
    arena.normal_(generator=generator)
    order = torch.randperm(frames, generator=generator, device=device).to(torch.int32) + 1
    table = order.view(rows, pages, geometry.frames_per_page).contiguous()
    return PagedCache(frames=arena.view(torch.uint8), frame_table=table, geometry=geometry)


def guarded(name: str, work: Callable[[], None], failures: dict[str, str]) -> None:
    """Run one section; a failure is recorded under `name` and printed, and the next section still runs."""
    begin = time.perf_counter()
    try:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:  # a kept result names every section that failed
        failures[name] = traceback.format_exc()
        print(f"FAILED {name}\n{failures[name]}", flush=True)
    print(f"[{name}: {time.perf_counter() - begin:.1f} s]", flush=True)


def write_failures(failures: dict[str, str], directory: Path) -> None:
    if failures:
        (directory / "failures.json").write_text(json.dumps(failures, indent=2), encoding="utf-8")
