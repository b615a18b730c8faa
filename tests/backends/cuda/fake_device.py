"""Streams without a GPU: what is enqueued runs kernel by kernel, later, whenever the test lets the devices go on.

A pass goes on to its next layer once its rows have come, as kernels that wait on a device would. So hosts and devices
of several ranks go on in whatever order, in one thread.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from crosspool.backends.cuda.steps import lane as lane_module
from crosspool.backends.cuda.steps.lane import WorkerLane
from crosspool.backends.cuda.steps.records import RING_SLOTS, RUN_AT

BASE, CURSOR = 0, 2
"""Words of a lane on its device."""

LEFT = 2
"""Word of a record's part about its run."""


class FakeStream:
    """One lane's work in order. Each piece yields where it waits; it is asked again until that has come."""

    def __init__(self, lane: WorkerLane) -> None:
        self.lane = lane
        self._work: deque[Iterator[None]] = deque()
        self.num_begun = 0  # passes

    @property
    def is_idle(self) -> bool:
        return not self._work

    def add(self, work: Iterator[None]) -> None:
        self._work.append(work)

    def go_on(self) -> bool:
        """Run up to the next wait; whether there was anything to run."""
        if not self._work:
            return False
        if next(self._work[0], self) is self:
            self._work.popleft()
        return True

    def synchronize(self) -> None:
        while self.go_on():
            pass

    def query(self) -> None:
        return

    def one_pass(self, source) -> Iterator[None]:
        """A captured pass of a KV rank or a weights rank."""
        self.num_begun += 1
        memory, flags = self.lane.memory, [link.map().inbox.flag for link in self.lane.links.values()]
        for layer in source.kernels():
            want = int(memory.words[BASE]) + layer + 1
            while any(int(ctypes.c_uint64.from_address(flag).value) < want for flag in flags) and not self._gives_up():
                yield
        yield

    def _gives_up(self) -> bool:
        memory = self.lane.memory
        return int(memory._host[1]) >= int(memory.words[BASE])

    def loop(self, source, may_be_skipped: bool) -> Iterator[None]:
        """A captured pass in its loop: as often as its condition says."""
        if may_be_skipped and not (yield from self._decide(source, is_first=True)):
            return
        while True:
            yield from self.one_pass(source)
            if not (yield from self._decide(source)):
                return

    def _decide(self, source, *, is_first: bool = False) -> Iterator[None]:
        """Whether the step of the next record begins; a weights rank waits for its rows first."""
        memory = self.lane.memory
        cursor = int(memory.words[CURSOR])
        record = memory.records.memory.numpy()[(cursor if is_first else cursor - 1) % RING_SLOTS]
        left = int(record[RUN_AT + LEFT])
        if not is_first and left == 0:
            source.advance(0)
            return False
        if self.lane.site.rank != "kv0":
            base = int(record[:2].view("<i8")[0]) if is_first else int(memory.words[BASE]) + source_layers(source)
            flags = [link.map().inbox.flag for link in self.lane.links.values()]
            while any(int(ctypes.c_uint64.from_address(flag).value) < base + 1 for flag in flags):
                if int(memory._host[1]) >= base:
                    break
                yield
        source.advance(0, is_first=is_first)
        return int(memory.words[CURSOR]) == cursor


def source_layers(source) -> int:
    return len(source._half.layers)


class Replayable:
    def __init__(self, replay) -> None:
        self.replay, self.num_bytes = lambda stream=None: replay(), 0


def use_fake_devices(monkeypatch) -> list[FakeStream]:
    """Every lane made from now on has a stream of its own; they are in the list that is returned."""
    streams: list[FakeStream] = []
    plain = WorkerLane.__init__

    def made(self, site, rule, kernels, **options):
        plain(self, site, rule, kernels, **options)
        self.stream = FakeStream(self)
        self.memory.device = SimpleNamespace(type="cuda")
        streams.append(self.stream)

    def capture(self, source, links, name):
        return Replayable(lambda: self.stream.add(self.stream.one_pass(source)))

    def capture_loop(source, stream, name, *, may_be_skipped):
        own = next(each for each in streams if each.lane._capture_stream is stream and owns(each, source))
        return Replayable(lambda: own.add(own.loop(source, may_be_skipped)))

    def owns(stream, source) -> bool:
        return any(source is each for each in stream.lane._passes.values())

    monkeypatch.setattr(WorkerLane, "__init__", made)
    monkeypatch.setattr(WorkerLane, "_capture", capture)
    monkeypatch.setattr(lane_module, "capture_loop", capture_loop)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return streams
