"""Runs one side of a chunk: kernels are enqueued piece by piece, a few pieces ahead of the device.

Between two pieces the rank's loop serves other lanes, so that a decode step waits for the host as long as one piece's
launches take, and the next pieces may keep to a part of the device as soon as somebody decodes beside them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.chunk_plan import ChunkPlan
from crosspool.backends.cuda.lane import WorkerLane
from crosspool.backends.cuda.link import DeviceInlet

PIECES_AHEAD = 3
"""Pieces of a layer that are enqueued before the device has ended an earlier one."""


def run_pieces(
    lane: WorkerLane,
    inlets: Sequence[DeviceInlet],
    plan: ChunkPlan,
    kernels: Iterator[int],
    has_neighbours: Callable[[], bool],
) -> HalfStep[None]:
    """Enqueue all of `kernels`, which yields the number of each crossing before it waits for it.

    has_neighbours: whether other lanes of this device decode now.
    """
    if lane.stream is None:  # emulated kernels run at once: wait in their stead
        for number in kernels:
            yield Wait(inlets, plan.base + number + 1)
        return
    ended: deque[Any] = deque()
    try:
        is_open = True
        while is_open:
            with torch.cuda.stream(lane.prefill_streams.pick(has_neighbours())):
                is_open = next(kernels, None) is not None
                event = torch.cuda.Event()
                event.record()
            ended.append(event)
            if len(ended) <= PIECES_AHEAD:
                continue
            oldest = ended.popleft()
            for inlet in inlets:
                inlet.pace = oldest.query
            yield Wait(inlets, plan.base + 1)
    finally:
        for inlet in inlets:
            inlet.pace = None
