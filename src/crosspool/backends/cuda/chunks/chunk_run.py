"""Runs one side of a chunk: kernels are enqueued piece by piece, a few pieces ahead of the device.

Between two pieces the rank's loop serves other lanes, so that a decode step waits for the host as long as one piece's
launches take, and the next pieces may keep to a part of the device as soon as somebody decodes beside them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.channels.link import DeviceInlet
from crosspool.backends.cuda.channels.transport import begin_pass, end_pass
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.device.streams import on_stream
from crosspool.backends.cuda.steps.lane import WorkerLane
from crosspool.backends.cuda.weights_rank.patience import Patience

PIECES_AHEAD = 3
"""Pieces of a layer that are enqueued before the device has ended an earlier one."""

ENDLESS = Patience(None)
"""That of a KV rank: its decode leaves gaps enough."""

NO_CROSSING = -1
"""Yielded by a chunk's kernels where they wait for nobody and others may be served."""


class Crossings(Protocol):
    """What a chunk's flags are numbered by: crossing n carries the epoch base + n + 1."""

    @property
    def base(self) -> int: ...

    @property
    def num_crossings(self) -> int: ...

    @property
    def last_epoch(self) -> int: ...


def run_pieces(
    launcher: Launcher,
    lane: WorkerLane,
    inlets: Sequence[DeviceInlet],
    plan: Crossings,
    kernels: Iterator[int],
    has_neighbours: Callable[[], bool],
    patience: Patience = ENDLESS,
) -> HalfStep[None]:
    """Enqueue all of `kernels`, which yields the number of each crossing before it waits for it, or NO_CROSSING.

    Other lanes are served at each of these, also while the chunk is not far enough ahead: its first pieces, and what is
    planned before them, are several milliseconds of the host. has_neighbours: whether other lanes of this device decode
    now; beside them pieces have a low priority while `patience` lasts. A chunk that is given up half-way ends on the
    device as well, once its waits have given up, so that the lane is free for the next step.
    """
    lane.memory.push(plan.base, plan.num_crossings)
    with on_stream(_stream(lane, has_neighbours(), patience)):
        begin_pass(launcher, lane.memory)
    ended: deque[Any] = deque()
    free: list[Any] = []
    is_open = True
    try:
        while is_open:
            stream = _stream(lane, has_neighbours(), patience)
            with on_stream(stream):
                number = next(kernels, None)
            is_open = number is not None
            if lane.stream is None:  # emulated kernels run at once: wait in their stead
                if number is not None and number != NO_CROSSING:
                    yield Wait(inlets, plan.base + number + 1)
                continue
            event = free.pop() if free else torch.cuda.Event()
            event.record(stream)
            ended.append(event)
            waited = ended.popleft() if len(ended) > PIECES_AHEAD else None
            for inlet in inlets:
                inlet.has_come = _may_go_on if waited is None else waited.query
            yield Wait(inlets, plan.base + 1)
            if waited is not None:
                free.append(waited)
    finally:
        for inlet in inlets:
            inlet.has_come = None
        with on_stream(_stream(lane, has_neighbours(), patience)):
            end_pass(launcher, lane.memory, plan.num_crossings)


def _may_go_on() -> bool:
    """Nothing of the chunk has to be waited for yet."""
    return True


def _stream(lane: WorkerLane, is_shared: bool, patience: Patience) -> Any:
    """The lane's stream for chunks; None where kernels are emulated."""
    return None if lane.stream is None else lane.prefill_streams.pick(is_shared, patience.is_out)
