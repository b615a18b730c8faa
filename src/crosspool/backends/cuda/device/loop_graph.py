"""Step graphs that repeat themselves: a WHILE node around a captured pass, whose last kernel says whether to go on.

The host launches such a graph once for a run of steps; until the run is over the device needs it no more (decision 17).
"""

import weakref
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from crosspool.backends.cuda.device.graphs import Capturable, capturing, record
from crosspool.backends.cuda.device.launch import CudaError

_RUNS_ONCE_AT_LEAST = 1


@runtime_checkable
class Repeatable(Capturable, Protocol):
    """A pass that knows whether it goes on."""

    def advance(self, again: int, *, is_first: bool = False) -> None:
        """Enqueue the kernel that sets the condition `again`: after a step, or before the first."""
        ...


@dataclass(frozen=True)
class LoopGraph:
    """A captured pass in its loop. `num_bytes`: device memory that capturing took."""

    name: str
    executable: Any
    source: Repeatable  # its buffers are the graph's
    body: Any  # torch's graph of the pass, which owns what was allocated while it was captured
    seconds: float
    num_bytes: int

    def replay(self, stream: Any) -> None:
        """Enqueue the loop on torch's `stream`, within an NVTX range of its name."""
        torch.cuda.nvtx.range_push(self.name)
        _call("cuGraphLaunch", self.executable, stream.cuda_stream)
        torch.cuda.nvtx.range_pop()


def capture_loop(source: Repeatable, stream: Any, name: str = "pass", *, may_be_skipped: bool = False) -> LoopGraph:
    """Capture a pass on `stream` in a loop. As `graphs.capture` otherwise.

    may_be_skipped: a kernel before the loop decides whether its first round runs.
    """
    from cuda.bindings import driver

    with capturing(stream) as cost:
        body = record(source, is_part=True)
        graph = _call("cuGraphCreate", 0)
        context = _call("cuCtxGetCurrent")
        again = _call("cuGraphConditionalHandleCreate", graph, context, _RUNS_ONCE_AT_LEAST, _RUNS_ONCE_AT_LEAST)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        first: list[Any] = []
        if may_be_skipped:
            _call("cuStreamBeginCaptureToGraph", stream.cuda_stream, graph, None, None, 0, mode)
            try:
                source.advance(int(again), is_first=True)
            finally:
                _call("cuStreamEndCapture", stream.cuda_stream)
            first = _call("cuGraphGetNodes", graph, 1)
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = again
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context
        _call("cuGraphAddNode", graph, first or None, None, len(first), node)
        inside = node.conditional.phGraph_out[0]
        step = _call("cuGraphAddChildGraphNode", inside, None, 0, driver.CUgraph(body.raw_cuda_graph()))
        _call("cuStreamBeginCaptureToGraph", stream.cuda_stream, inside, [step], None, 1, mode)
        try:
            source.advance(int(again))
        finally:
            _call("cuStreamEndCapture", stream.cuda_stream)
        executable = _call("cuGraphInstantiate", graph, 0)
        _call("cuGraphDestroy", graph)
    loop = LoopGraph(name, executable, source, body, cost.seconds, cost.num_bytes)
    weakref.finalize(loop, driver.cuGraphExecDestroy, executable).atexit = False  # then the context is gone too
    return loop


def _call(name: str, *arguments: Any) -> Any:
    """A driver call on graphs. Raises CudaError that names it."""
    from cuda.bindings import driver

    status, *results = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{name} failed: {status.name}")
    return results[0] if results else None
