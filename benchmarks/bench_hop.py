"""How long does a payload take from one GPU's memory to the other's, flag included, inside step graphs?

    python -m benchmarks.bench_hop [--out DIRECTORY] [--round-trips 1000000]

Two graphs bounce rows: each kernel waits for its flag, copies its rows to the peer and raises the peer's flag. A second
part adds one to every element at each turn, so that a single stale or torn row would show; with random delays as well.
`nvshmem`: the same graphs in two processes, over memory of NVSHMEM, where that is installed.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch

from benchmarks.crossings.bouncer import Bouncer
from benchmarks.crossings.hop_by_nvshmem import hops_by_nvshmem
from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.report import RESULTS, Report
from benchmarks.split_model.model import Gpus, Side
from crosspool.backends.cuda.channels.channel_map import ChannelMap
from crosspool.backends.cuda.channels.nvshmem import find_library
from crosspool.backends.cuda.channels.peer_memory import Memory, PlainMemory, RegisteredMemory
from crosspool.backends.cuda.device.driver import Driver
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.cluster.channel import channel_bytes
from crosspool.cluster.region import FileRegion

HOPS = 96
SIZES = (16, 4096, 16384, 32768, 65536, 131072)
LIMIT_US = 2.06
"""A bare flag over NVLink, measured on this hardware."""


def bouncers(gpus: Gpus, num_bytes: int, turns: int, path: str = "peer") -> tuple[list[Bouncer], list[Memory]]:
    sides = [Side.on(gpus.kernels[idx], WaitRule(deadline_s=2.0)) for idx in range(2)]
    capacity = num_bytes // 4
    memory: list[Memory]
    if path == "host":
        regions = [FileRegion.create(channel_bytes(capacity)).map() for _ in range(2)]
        memory = [RegisteredMemory(Driver("bench"), region) for region in regions]
    else:
        memory = [PlainMemory(channel_bytes(capacity), device) for device in gpus.devices[:2]]
    maps = [ChannelMap(own.base, capacity) for own in memory]
    return [Bouncer(sides[idx], maps[idx], maps[1 - idx], num_bytes, turns, idx == 0) for idx in range(2)], memory


def measure(gpus: Gpus, num_bytes: int, path: str, replays: int = 200) -> list[float]:
    """Microseconds one hop took in each replay (a mean over its hops)."""
    ends, memory = bouncers(gpus, num_bytes, HOPS // 2, path)
    graphs = [end.side.capture(end) for end in ends]
    times = []
    for replay in range(1, replays + 6):
        for end in ends:
            end.side.lane.push(1024 * replay, HOPS // 2)
        ends[1].side.replay(graphs[1])
        begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(ends[0].side.stream):
            begin.record()
            graphs[0].replay(ends[0].side.stream)
            stop.record()
        for end in ends:
            end.side.stream.synchronize()
        if any(end.side.lane.late_epoch(0) for end in ends):
            raise RuntimeError(f"a hop of {num_bytes} bytes by the {path} path missed its deadline")
        if replay > 5:
            times.append(begin.elapsed_time(stop) * 1e3 / HOPS)
    for own in memory:
        own.close()
    return times


def count_turns(gpus: Gpus, num_bytes: int, round_trips: int, delays: bool) -> int:
    """Bounce rows that grow by one at every turn; returns the number of wrong elements at the end."""
    turns = 500
    ends, memory = bouncers(gpus, num_bytes, turns)
    for idx, end in enumerate(ends):
        tensor = memory[idx]._tensor  # type: ignore[attr-defined]
        start = end.inbox.base - tensor.data_ptr()
        end.inbox_rows = [
            tensor[start + end.inbox.slot(parity) - end.inbox.base :][:num_bytes].view(torch.int32)
            for parity in range(2)
        ]
        if delays:
            end.delays = random.Random(idx)
    ends[0].source.copy_(torch.arange(num_bytes // 4, dtype=torch.int32))
    torch.cuda.synchronize(ends[0].side.kernels.device)
    graphs = [end.side.capture(end) for end in ends]
    replays = max(1, round_trips // turns)
    for replay in range(1, replays + 1):
        for end, graph in zip(ends, graphs, strict=True):
            end.side.lane.push(1024 * replay, turns)
            end.side.replay(graph)
        if replay % 16 == 0 or replay == replays:
            for end in ends:
                end.side.stream.synchronize()
    if any(end.side.lane.late_epoch(0) for end in ends):
        raise RuntimeError("a turn missed its deadline")
    # A turn adds one at the second end, and one at the first end before its next turn.
    added = replays * (2 * turns - 1)
    expected = torch.arange(num_bytes // 4, dtype=torch.int32) + added
    return int((ends[0].source.cpu() != expected).sum())


class Hops:
    """The parts of the benchmark."""

    def __init__(self, gpus: Gpus, report: Report, round_trips: int) -> None:
        self.gpus, self.report, self.round_trips = gpus, report, round_trips

    def by_path(self, path: str, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            self._tell(size, "" if path == "peer" else f".{path}", measure(self.gpus, size, path))

    def by_nvshmem(self) -> None:
        begin_s = time.perf_counter()
        trips = self.round_trips // 10
        times, wrong = hops_by_nvshmem(SIZES, HOPS, round_trips=trips)
        for size, samples in times.items():
            self._tell(size, ".nvshmem", samples)
        self.report.metric("wrong_elements.nvshmem", wrong, limit=0, note=f"{trips} round trips of 4 KB")
        print(f"wrong_elements.nvshmem: {wrong}; all in {time.perf_counter() - begin_s:.1f} s", flush=True)

    def counts(self, delays: bool) -> None:
        trips = self.round_trips // 20 if delays else self.round_trips
        begin = time.perf_counter()
        wrong = count_turns(self.gpus, 4096, trips, delays)
        name = "wrong_elements.delays" if delays else "wrong_elements"
        note = f"{trips} round trips of 4 KB in {time.perf_counter() - begin:.1f} s"
        self.report.metric(name, wrong, limit=0, note=note)
        print(f"{name}: {wrong} after {trips} round trips", flush=True)

    def _tell(self, size: int, path: str, times: list[float]) -> None:
        name = (f"hop_us.{size // 1024}k" if size >= 1024 else f"hop_us.{size}b") + path
        self.report.samples(name, times, limit=LIMIT_US + size / 371e3, note="bare flag + bytes at 371 GB/s")
        p50, p99 = (sorted(times)[int(len(times) * part)] for part in (0.5, 0.99))
        print(f"{name}: {p50:.2f} us, P99 {p99:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--round-trips", type=int, default=1_000_000)
    options = parser.parse_args()
    gpus, failures = Gpus(2), dict[str, str]()
    config = {"hops_a_graph": HOPS, "round_trips": options.round_trips}
    report = Report("hop", hardware="h200-x2", config=config, seed=0)
    report.summary = (
        "One way, wait and put in one kernel, inside graphs on both GPUs; each sample a mean over one graph."
    )
    hops = Hops(gpus, report, options.round_trips)
    guarded("hop peer", lambda: hops.by_path("peer", SIZES), failures)
    guarded("hop host", lambda: hops.by_path("host", (16, 4096, 32768)), failures)
    if find_library().is_absolute():
        guarded("hop nvshmem", hops.by_nvshmem, failures)
    guarded("counts", lambda: hops.counts(False), failures)
    guarded("counts with delays", lambda: hops.counts(True), failures)
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
