"""What do decode's kernels and a prompt's cost each other on one GPU, by the part of it that the prompt keeps to?

    python -m benchmarks.bench_beside_prompts [--models a,b] [--shares 0.3,0.4,0.55,0.7] [--rows 4] [--out DIRECTORY]

Each pool's side by itself: layers of decode, captured as steps without fused layers are, of decode's priority, while a
prompt's pieces of 2,048 tokens follow each other on a partition of the multiprocessors. Nothing waits for a crossing,
so a layer takes here what it takes where the other pool is never late.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_prefill_kernels import Layer
from benchmarks.full_models import CONFIGS, full_spec
from benchmarks.gpu_timing import guarded, warm_up, write_failures
from benchmarks.kv_pool.filled_half import filled_half
from benchmarks.report import RESULTS, Report
from crosspool.backends.cuda.chunks.chunk_ffn import ChunkFFN
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.device.queues import DECODE_STREAM_PRIORITY
from crosspool.backends.cuda.device.sm_partition import SmPartition
from crosspool.backends.cuda.loading.weights import random_ffn_weights
from crosspool.backends.cuda.weights_rank.ffn_half import FFNHalf

SEED = 7
PIECE_TOKENS = 2048
CACHED = 30720
CONTEXT = 1024
DECODE_LAYERS = 16
FFN_LAYERS = 4
STEPS = 12
"""Replays of the decode layers in one measurement."""


@dataclass(frozen=True)
class Side:
    """One pool's work. decode: `layers` layers of one step; piece: one layer of a prompt's piece.

    is_captured: whether pieces are replayed from a graph, because the host takes as long to launch one as it runs.
    """

    name: str
    layers: int
    decode: Callable[[], None]
    piece: Callable[[], object]
    is_captured: bool = False

    def piece_on(self, stream: Any) -> Callable[[], object]:
        """The piece, for the stream that is then torch's current one."""
        if not self.is_captured:
            return self.piece
        with torch.cuda.stream(stream):
            self.piece()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.piece()
            finally:
                graph.capture_end()
        replay: Callable[[], object] = graph.replay
        return replay


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Of decode's priority, as steps are."""
    stream = torch.cuda.Stream(priority=DECODE_STREAM_PRIORITY)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def decode_times(graph: torch.cuda.CUDAGraph, layers: int) -> list[float]:
    """Microseconds a layer took in each replay; enqueued on a stream of decode's priority."""
    stream = torch.cuda.Stream(priority=DECODE_STREAM_PRIORITY)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    with torch.cuda.stream(stream):
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
    stream.synchronize()
    return [a.elapsed_time(b) * 1e3 / layers for a, b in pairwise(events[1:])]


def pieces(piece: Callable[[], object], stream: Any, count: int) -> tuple[Any, Any]:
    """Events around `count` pieces on the stream, which are enqueued now."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        piece()
        begin.record()
        for _ in range(count):
            piece()
        end.record()
    return begin, end


def measure(report: Report, side: Side, streams: dict[str, Any]) -> None:
    """Both alone, then beside each other."""
    graph = captured(side.decode)
    warm_up(graph.replay)
    alone = median(decode_times(graph, side.layers))
    report.metric(f"decode_layer_us.{side.name}.alone", alone)
    print(f"{side.name}: a decode layer {alone:.1f} us alone", flush=True)
    for label, stream in streams.items():
        piece = side.piece_on(stream)
        begin, end = pieces(piece, stream, 8)
        torch.cuda.synchronize()
        piece_alone = begin.elapsed_time(end) * 1e3 / 8
        # enough pieces to last while decode's replays take three times as long as alone
        count = max(8, int(3.2 * alone * side.layers * STEPS / piece_alone) + 2)
        begin, end = pieces(piece, stream, count)
        times = decode_times(graph, side.layers)
        is_covered = not end.query()
        torch.cuda.synchronize()
        beside = begin.elapsed_time(end) * 1e3 / count
        name = f"{side.name}.{label}"
        note = "a prompt's pieces run meanwhile" if is_covered else "the prompt ended before"
        report.metric(f"decode_layer_us.{name}", median(times), limit=alone, note=note)
        report.metric(f"decode_layer_max_us.{name}", max(times), limit=alone)
        report.metric(f"piece_us.{name}.alone", piece_alone)
        report.metric(f"piece_us.{name}", beside, limit=piece_alone)
        print(
            f"  {name}: a decode layer {median(times):.1f} us (at most {max(times):.1f}), a piece's {piece_alone:.0f} "
            f"alone, {beside:.0f} beside; {note}",
            flush=True,
        )


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def ffn_side(kernels: DeviceKernels, name: str, rows: int) -> Side:
    spec = full_spec(name, FFN_LAYERS)
    layers = random_ffn_weights(spec, SEED, kernels.device)
    half, chunks = FFNHalf(kernels, layers, rows), ChunkFFN(kernels, layers)
    x = torch.randn(rows, spec.hidden_size, device=kernels.device).bfloat16()
    out = torch.empty(rows, spec.hidden_size, device=kernels.device)
    many = torch.randn(PIECE_TOKENS, spec.hidden_size, device=kernels.device).bfloat16()
    sums = torch.empty(PIECE_TOKENS, spec.hidden_size, device=kernels.device)

    def decode() -> None:
        for layer in range(DECODE_LAYERS):
            half.run(layer % FFN_LAYERS, x, out)

    return Side(f"{name}.ffn", DECODE_LAYERS, decode, lambda: chunks.run(0, many, sums))


def attention_side(kernels: DeviceKernels, name: str, rows: int) -> Side:
    half = filled_half(kernels, kernels.device, name, DECODE_LAYERS, rows, CONTEXT, SEED)
    partial = torch.zeros_like(half.residual)

    def decode() -> None:
        for layer in range(DECODE_LAYERS):
            half.attend(layer)
            half.add(layer, [partial])

    prompt, piece = Layer(kernels, name, CACHED + PIECE_TOKENS).half(PIECE_TOKENS, CACHED)
    return Side(f"{name}.attention", DECODE_LAYERS, decode, lambda: prompt.attend(0, piece), is_captured=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--shares", default="0.3,0.4,0.55,0.7", help="of the multiprocessors, for the prompt")
    parser.add_argument("--rows", type=int, default=4, help="that decode")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    kernels, driver = DeviceKernels(device), Driver("bench")
    report = Report("beside_prompts", hardware="h200", config={"rows": options.rows, "cached": CACHED}, seed=SEED)
    report.summary = "A layer of decode and a layer of a prompt's piece on one GPU, beside each other; each pool apart."
    streams: dict[str, Any] = {}
    for share in options.shares.split(","):
        partition = SmPartition.create(driver, 0, int(kernels.num_sms * float(share)))
        if partition is None:
            raise RuntimeError("this driver offers no partitions of a GPU's multiprocessors")
        print(f"share {share}: {partition.num_sms} multiprocessors", flush=True)
        streams[f"share_{share}"] = partition.stream(driver, device, 0)
    failures: dict[str, str] = {}
    for name in options.models.split(","):
        for make in (ffn_side, attention_side):

            def run(make: Callable[[DeviceKernels, str, int], Side] = make, name: str = name) -> None:
                measure(report, make(kernels, name, options.rows), streams)

            guarded(f"{name} {make.__name__}", run, failures)
            torch.cuda.empty_cache()
            report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
