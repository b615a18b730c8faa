"""Gaps between replayed decode steps, with something going on beside them and without, in turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.gpu_timing import warm_up
from benchmarks.kv_pool.cache_attention import CacheAttention
from benchmarks.report import Report
from crosspool.backends.cuda.kv_frames.cache import PagedCache

Beside = Callable[[threading.Event], None]
"""What a thread does beside the steps until the event is set."""


@dataclass
class PairedGaps:
    """Microseconds from step to step. rounds: of each, what the P99 gained by what was beside, in percent."""

    quiet_us: list[float] = field(default_factory=list)
    beside_us: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    beside_s: float = 0.0

    def add_round(self, quiet_us: list[float], beside_us: list[float]) -> None:
        self.quiet_us += quiet_us
        self.beside_us += beside_us
        quiet, beside = (float(np.percentile(gaps, 99)) for gaps in (quiet_us, beside_us))
        self.rounds.append(100 * (beside / quiet - 1))

    def report_overhead(self, report: Report, name: str, note: str) -> None:
        """Metrics `name`_percent and `name`_us."""
        quiet, beside = (float(np.percentile(gaps, 99)) for gaps in (self.quiet_us, self.beside_us))
        report.metric(f"{name}_percent", 100 * (beside / quiet - 1), limit=0.0, note=note)
        report.metric(f"{name}_us", beside - quiet, limit=0.0)
        median = float(np.median(self.rounds))
        report.metric(f"{name}_percent.median_round", median, note=f"of {len(self.rounds)} rounds")
        print(name, quiet, beside, np.round(self.rounds, 2), flush=True)


def step_graph(attention: CacheAttention, cache: PagedCache) -> torch.cuda.CUDAGraph:
    """A step: attention of all layers of the cache."""
    layers = cache.geometry.num_layers
    work = attention.layers(cache, layers, layers)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def paired_gaps(graph: torch.cuda.CUDAGraph, beside: Beside, num_gaps: int, num_rounds: int) -> PairedGaps:
    """`num_gaps` of each kind, in rounds of both; which of them comes first changes from round to round."""
    warm_up(graph.replay)
    gaps = PairedGaps()
    for number in range(num_rounds):
        found: dict[bool, list[float]] = {}
        for is_beside in (False, True) if number % 2 == 0 else (True, False):
            stop = threading.Event()
            other = threading.Thread(target=beside, args=(stop,))
            started_s = time.perf_counter()
            if is_beside:
                other.start()
            found[is_beside] = gaps_us(graph, num_gaps // num_rounds)
            stop.set()
            if is_beside:
                other.join()
                gaps.beside_s += time.perf_counter() - started_s
        gaps.add_round(found[False], found[True])
    return gaps


def gaps_us(graph: torch.cuda.CUDAGraph, count: int, meanwhile: Callable[[], None] | None = None) -> list[float]:
    """meanwhile: what the thread that launches steps does while one is under way."""
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    found = []
    last_s = time.perf_counter()
    for _ in range(count):
        graph.replay()
        if meanwhile is not None:
            meanwhile()
        torch.cuda.current_stream().synchronize()
        now_s = time.perf_counter()
        found.append(1e6 * (now_s - last_s))
        last_s = now_s
    return found
