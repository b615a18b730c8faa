"""Gaps between replayed decode steps, with something going on beside them and without, in turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.cache_attention import CacheAttention
from benchmarks.gpu_timing import keep_busy
from benchmarks.report import Report
from crosspool.backends.cuda.cache import PagedCache

Beside = Callable[[threading.Event], None]
"""What a thread does beside the steps until the event is set."""


@dataclass
class PairedGaps:
    """Microseconds from step to step. rounds: of each, what the P99 gained by what was beside, in percent."""

    quiet_us: list[float] = field(default_factory=list)
    beside_us: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    beside_s: float = 0.0

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
    keep_busy(0.2)
    gaps = PairedGaps()
    for number in range(num_rounds):
        found: dict[bool, list[float]] = {}
        for is_beside in (False, True) if number % 2 == 0 else (True, False):
            stop = threading.Event()
            other = threading.Thread(target=beside, args=(stop,))
            started_s = time.perf_counter()
            if is_beside:
                other.start()
            found[is_beside] = _gaps_us(graph, num_gaps // num_rounds)
            stop.set()
            if is_beside:
                other.join()
                gaps.beside_s += time.perf_counter() - started_s
        gaps.quiet_us += found[False]
        gaps.beside_us += found[True]
        quiet, besides = (float(np.percentile(found[kind], 99)) for kind in (False, True))
        gaps.rounds.append(100 * (besides / quiet - 1))
    return gaps


def _gaps_us(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    found = []
    last_s = time.perf_counter()
    for _ in range(count):
        graph.replay()
        torch.cuda.current_stream().synchronize()
        now_s = time.perf_counter()
        found.append(1e6 * (now_s - last_s))
        last_s = now_s
    return found
