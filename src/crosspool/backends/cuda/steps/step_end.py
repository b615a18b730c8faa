"""The wait for the end of a single step that lies on the device."""

import time
from collections.abc import Sequence

from crosspool.backends.base import Arrival, HalfStep, Wait
from crosspool.backends.cuda.steps.lane import WorkerLane
from crosspool.scheduler.step import StepHeader


def await_end(lane: WorkerLane, header: StepHeader, arrivals: Sequence[Arrival], last_epoch: int) -> HalfStep[None]:
    """Wait until the step has ended here; while it decodes, its host rests for as long as such steps usually take."""
    memory = lane.memory
    if lane.stream is None or header.phase != "decode":
        yield Wait(arrivals, last_epoch)
        return
    pace = memory.step_pace_of(header.model, header.num_tokens)
    pace.begin(time.monotonic(), lambda: memory.last_epoch > last_epoch)
    yield Wait((pace, *arrivals), last_epoch, (), pace.nap_s)
    pace.ends(time.monotonic())
