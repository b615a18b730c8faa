"""Hops through NVSHMEM's memory: the same kernels and graphs as by the peer path, but two processes with a GPU each."""

from __future__ import annotations

import multiprocessing
import queue
import secrets
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from benchmarks.crossings.bouncer import Bouncer
from benchmarks.split_model.model import Side
from crosspool.backends.cuda.channels.channel_map import ChannelMap
from crosspool.backends.cuda.channels.nvshmem import NvshmemLibrary
from crosspool.backends.cuda.channels.nvshmem_team import join_team
from crosspool.backends.cuda.channels.symmetric_heap import SymmetricHeap
from crosspool.backends.cuda.device.device_bytes import device_bytes
from crosspool.backends.cuda.device.graphs import StepGraph
from crosspool.backends.cuda.device.launch import DeviceKernels
from crosspool.backends.cuda.steps.lane_memory import WaitRule
from crosspool.cluster.channel import channel_bytes
from crosspool.units import MiB

BLOCK_BYTES = 16 * MiB
ENDS = ("first", "second")
UNTIMED = 5
"""Replays before those that count."""

TURNS = 500
"""Of a graph that adds one at each turn."""

PATIENCE_S = 20.0


class End:
    """One of the two processes, once both have met; they do the same things in the same order."""

    def __init__(self, number: int, token: str, barrier: Barrier) -> None:
        self.number, self.barrier = number, barrier
        torch.cuda.set_device(number)
        self.kernels = DeviceKernels(torch.device("cuda", number))
        calls, name = NvshmemLibrary(4 * BLOCK_BYTES), ENDS[number]
        self.heap = SymmetricHeap(calls, name, join_team(calls, name, ENDS, token), BLOCK_BYTES)

    def bouncer(self, num_bytes: int, turns: int) -> Bouncer:
        capacity = num_bytes // 4
        part = self.heap.take(channel_bytes(capacity))
        theirs = self.heap.at_peer(ENDS[1 - self.number], part.offset)  # it takes the same parts
        maps = ChannelMap(part.base, capacity), ChannelMap(theirs, capacity)
        side = Side.on(self.kernels, WaitRule(deadline_s=2.0))
        return Bouncer(side, *maps, num_bytes, turns, self.number == 0)

    def hops_us(self, num_bytes: int, hops: int, replays: int) -> list[float]:
        """Microseconds a hop took in each replay of a graph: the first end's clock, the second is there before it."""
        end = self.bouncer(num_bytes, hops // 2)
        graph, times = end.side.capture(end), []
        for replay in range(1, replays + UNTIMED + 1):
            end.side.lane.push(1024 * replay, hops // 2)
            if self.number:
                end.side.replay(graph)
            self.barrier.wait(PATIENCE_S)
            if not self.number:
                took_us = self._timed(end, graph) / hops
                times += [took_us] if replay > UNTIMED else []
            self._finish(end)
        return times

    def wrong_elements(self, num_bytes: int, round_trips: int) -> int:
        """Of rows that grow by one at every turn, those that are not what they should be at the end."""
        end = self.bouncer(num_bytes, TURNS)
        end.inbox_rows = [
            device_bytes(end.inbox.slot(parity), (num_bytes,), self.kernels.device).view(torch.int32)
            for parity in range(2)
        ]
        start = torch.arange(num_bytes // 4, dtype=torch.int32)
        end.source.copy_(start)
        torch.cuda.synchronize()
        graph, replays = end.side.capture(end), max(1, round_trips // TURNS)
        self.barrier.wait(PATIENCE_S)
        for replay in range(1, replays + 1):
            end.side.lane.push(1024 * replay, TURNS)
            end.side.replay(graph)
            if replay % 16 == 0 or replay == replays:
                self._finish(end)
        return int((end.source.cpu() != start + replays * (2 * TURNS - 1)).sum())

    def _timed(self, end: Bouncer, graph: StepGraph) -> float:
        begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(end.side.stream):
            begin.record()
            graph.replay(end.side.stream)
            stop.record()
        end.side.stream.synchronize()
        return float(begin.elapsed_time(stop) * 1e3)

    def _finish(self, end: Bouncer) -> None:
        end.side.stream.synchronize()
        if end.side.lane.late_epoch(0):
            raise RuntimeError("a turn through NVSHMEM's memory missed its deadline")


def _run(
    number: int, token: str, barrier: Barrier, found: Any, sizes: Sequence[int], hops: int, replays: int, trips: int
) -> None:
    try:
        end = End(number, token, barrier)
        times = {size: end.hops_us(size, hops, replays) for size in sizes}
        wrong = end.wrong_elements(4096, trips)
    except BaseException as failure:
        found.put(RuntimeError(f"{ENDS[number]}: {type(failure).__name__}: {failure}"))
        barrier.abort()
        raise
    found.put((number, times, wrong))


def _next(found: Any, ends: Sequence[SpawnProcess]) -> Any:
    """What an end tells next. Raises RuntimeError where one is gone without a word: the library may end its process."""
    until_s = time.monotonic() + 2 * PATIENCE_S
    while True:
        try:
            return found.get(timeout=0.5)
        except queue.Empty:
            gone = [end.exitcode for end in ends if end.exitcode]
            if gone or time.monotonic() > until_s:
                raise RuntimeError(f"no word from the ends; of those that are gone the codes are {gone}") from None


def hops_by_nvshmem(
    sizes: Sequence[int], hops: int, replays: int = 200, round_trips: int = 100_000
) -> tuple[Mapping[int, list[float]], int]:
    """Microseconds of a hop by size, wrong elements of 4 KB after all round trips. Raises what an end raised."""
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(2), context.Queue()
    work = (secrets.token_hex(16), barrier, found, sizes, hops, replays, round_trips)
    ends = [context.Process(target=_run, args=(number, *work), daemon=True) for number in range(2)]
    for end in ends:
        end.start()
    try:
        results = [_next(found, ends) for _ in ends]
    finally:
        for end in ends:
            end.join(10.0)
            end.kill()
    for result in results:
        if isinstance(result, RuntimeError):
            raise result
    _, times, wrong = min(results)  # the first end's
    return times, wrong
