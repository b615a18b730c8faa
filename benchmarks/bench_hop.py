"""How long does a payload take from one GPU's memory to the other's, flag included, inside step graphs?

    python -m benchmarks.bench_hop [--out DIRECTORY] [--round-trips 1000000]

Two graphs bounce rows: each kernel waits for its flag, copies its rows to the peer and raises the peer's flag. A second
part adds one to every element at each turn, so that a single stale or torn row would show; with random delays as well.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu_timing import guarded, write_failures
from benchmarks.report import RESULTS, Report
from benchmarks.split_model import Gpus, Side
from crosspool.backends.cuda.channel_map import ChannelMap
from crosspool.backends.cuda.driver import Driver
from crosspool.backends.cuda.lane_memory import WaitRule
from crosspool.backends.cuda.peer_memory import Memory, PlainMemory, RegisteredMemory
from crosspool.backends.cuda.transport import begin_pass, end_pass
from crosspool.backends.cuda.transport_params import CrossParams, DelayParams, Flags, Slots
from crosspool.cluster.channel import channel_bytes
from crosspool.cluster.region import FileRegion

HOPS = 96
SIZES = (16, 4096, 16384, 32768, 65536, 131072)
LIMIT_US = 2.06
"""A bare flag over NVLink, measured on this hardware."""


class Bouncer:
    """One end: `kernels()` is a pass of `turns` hops. The first end starts each turn, the second answers it."""

    def __init__(
        self, side: Side, inbox: ChannelMap, outbox: ChannelMap, num_bytes: int, turns: int, first: bool
    ) -> None:
        self.side, self.inbox, self.outbox = side, inbox, outbox
        self.num_bytes, self.turns, self.first = num_bytes, turns, first
        self.blocks = max(1, num_bytes // 4096)
        self.source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=side.kernels.device)
        self.delays: random.Random | None = None
        self.inbox_rows: list[torch.Tensor] | None = None  # of even and odd turns: then every turn adds one

    def kernels(self) -> Iterator[int]:
        begin_pass(self.side.kernels, self.side.lane)
        for turn in range(self.turns):
            yield turn
            if self.delays is not None:
                nanoseconds = self.delays.choice((0, 0, 300, 2000, 8000))
                self.launch("delay", DelayParams(nanoseconds))
            waits = turn if not self.first else turn - 1
            if self.inbox_rows is None:
                self.cross(waits, turn)
                continue
            if waits >= 0:
                self.cross(waits, None)
                torch.add(self.inbox_rows[waits % 2], 1, out=self.source)
            self.cross(-1, turn)
        if self.first:
            self.cross(self.turns - 1, None)
            if self.inbox_rows is not None:
                self.source.copy_(self.inbox_rows[(self.turns - 1) % 2])
        end_pass(self.side.kernels, self.side.lane, self.turns)

    def cross(self, waits: int, raises: int | None) -> None:
        params = CrossParams(view=self.side.lane.view(), row_bytes=self.num_bytes // self.blocks)
        if waits >= 0:
            params.wait_for, params.wait_layer = Flags.at([self.inbox.flag]), waits
        if raises is not None:
            params.raise_for, params.raise_layer = Flags.at([self.outbox.flag]), raises
            params.rows, params.slots = self.source.data_ptr(), Slots(self.outbox.slot(raises))
        self.launch("cross", params, self.blocks if raises is not None else 1)

    def launch(self, kernel: str, params: CrossParams | DelayParams, blocks: int = 1) -> None:
        threads = 32 if kernel == "delay" else 256
        self.side.kernels.launch(
            "transport", kernel, grid=(blocks, 1, 1), threads=threads, smem_bytes=256, params=params
        )


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
            graphs[0].replay()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--round-trips", type=int, default=1_000_000)
    options = parser.parse_args()
    gpus, failures = Gpus(2), dict[str, str]()
    report = Report(
        "hop", hardware="h200-x2", config={"hops_a_graph": HOPS, "round_trips": options.round_trips}, seed=0
    )
    report.summary = (
        "One way, wait and put in one kernel, inside graphs on both GPUs; each sample a mean over one graph."
    )

    def hops(path: str, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            times = measure(gpus, size, path)
            name = f"hop_us.{size // 1024}k" if size >= 1024 else "hop_us.16b"
            name += "" if path == "peer" else f".{path}"
            report.samples(name, times, limit=LIMIT_US + size / 371e3, note="bare flag + bytes at 371 GB/s")
            print(f"{name}: {sorted(times)[len(times) // 2]:.2f} us", flush=True)

    def counts(delays: bool) -> None:
        trips = options.round_trips // 20 if delays else options.round_trips
        begin = time.perf_counter()
        wrong = count_turns(gpus, 4096, trips, delays)
        name = "wrong_elements.delays" if delays else "wrong_elements"
        report.metric(name, wrong, limit=0, note=f"{trips} round trips of 4 KB in {time.perf_counter() - begin:.1f} s")
        print(f"{name}: {wrong} after {trips} round trips", flush=True)

    guarded("hop peer", lambda: hops("peer", SIZES), failures)
    guarded("hop host", lambda: hops("host", (16, 4096, 32768)), failures)
    guarded("counts", lambda: counts(False), failures)
    guarded("counts with delays", lambda: counts(True), failures)
    report.write(options.out)
    write_failures(failures, options.out)


if __name__ == "__main__":
    main()
