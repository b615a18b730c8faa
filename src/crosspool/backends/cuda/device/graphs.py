"""Step graphs: the kernels of a pass captured once, replayed for every step.

A graph belongs to one lane, model, bucket and set of channel addresses. Capture touches no other stream and no other
thread's work, so that it may happen while other lanes run.
"""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

CAPTURING = threading.RLock()
"""Held while this process captures, and around calls that take torch's random state, which refuses them meanwhile."""


class Capturable(Protocol):
    """Something whose `kernels()` enqueues the same kernels each time."""

    def kernels(self) -> Iterator[int]: ...


@dataclass(frozen=True)
class StepGraph:
    """A captured pass. `num_bytes`: device memory that capturing took."""

    name: str
    graph: Any
    source: Capturable  # its buffers are the graph's
    seconds: float
    num_bytes: int

    def replay(self) -> None:
        """Enqueue the pass on torch's current stream, within an NVTX range of its name."""
        torch.cuda.nvtx.range_push(self.name)
        self.graph.replay()
        torch.cuda.nvtx.range_pop()


def capture(source: Capturable, stream: Any, name: str = "pass") -> StepGraph:
    """Capture a pass on `stream`, whose device must be current and on which nothing else may be enqueued meanwhile."""
    begin = time.perf_counter()
    free_before, _ = torch.cuda.mem_get_info(stream.device)
    graph = torch.cuda.CUDAGraph()
    with CAPTURING, torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _layer in source.kernels():
                pass
        finally:
            graph.capture_end()
    free_after, _ = torch.cuda.mem_get_info(stream.device)
    seconds = time.perf_counter() - begin
    return StepGraph(name, graph, source, seconds, max(0, free_before - free_after))
