"""Step graphs: the kernels of a pass captured once, replayed for every step.

A graph belongs to one lane, model, bucket and set of channel addresses. Capture touches no other stream and no other
thread's work, so that it may happen while other lanes run.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from crosspool.backends.cuda.device.executable import Executable

CAPTURING = threading.RLock()
"""Held while this process captures, and around calls that take torch's random state, which refuses them meanwhile."""


IS_TRACED = "NVTX_INJECTION64_PATH" in os.environ
"""Whether a profiler takes NVTX ranges, as NVTX itself finds out: a range that nobody takes costs as much as half a
graph's launch."""


class Capturable(Protocol):
    """Something whose `kernels()` enqueues the same kernels each time."""

    def kernels(self) -> Iterator[int]: ...


@dataclass(frozen=True)
class StepGraph:
    """A captured pass, alone or in its loop. `num_bytes`: device memory that capturing took."""

    name: str
    executable: Executable
    source: Capturable  # its buffers are the graph's
    body: Any  # torch's graph of the pass, which owns what was allocated while it was captured
    seconds: float
    num_bytes: int

    def replay(self, stream: Any) -> None:
        """Enqueue it on torch's `stream`, within an NVTX range of its name where a profiler reads those."""
        if not IS_TRACED:
            self.executable.launch(stream)
            return
        torch.cuda.nvtx.range_push(self.name)
        self.executable.launch(stream)
        torch.cuda.nvtx.range_pop()


@dataclass
class CaptureCost:
    """What captures took: time, and device memory."""

    seconds: float = 0.0
    num_bytes: int = 0


@contextmanager
def capturing(stream: Any) -> Iterator[CaptureCost]:
    """Nobody else of this process captures meanwhile, and torch's current stream is this one.

    Its device must be current, and nothing else may be enqueued on it. The cost is known afterwards.
    """
    begin_s, cost = time.perf_counter(), CaptureCost()
    free_before, _ = torch.cuda.mem_get_info(stream.device)
    with CAPTURING, torch.cuda.stream(stream):
        yield cost
    free_after, _ = torch.cuda.mem_get_info(stream.device)
    cost.seconds, cost.num_bytes = time.perf_counter() - begin_s, max(0, free_before - free_after)


def record(source: Capturable) -> Any:
    """A pass's kernels as torch's graph, which owns what was allocated meanwhile; within `capturing`."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _layer in source.kernels():
            pass
    finally:
        graph.capture_end()
    return graph


def capture(source: Capturable, stream: Any, name: str = "pass") -> StepGraph:
    """Capture a pass on `stream`, as `capturing` asks for."""
    with capturing(stream) as cost:
        body = record(source)
        executable = Executable(body.raw_cuda_graph(), name)
    return StepGraph(name, executable, source, body, cost.seconds, cost.num_bytes)
