"""Step graphs that repeat themselves: a WHILE node around a captured pass, whose last kernel says whether to go on.

The host launches such a graph once for a run of steps; until the run is over the device needs it no more (decision 17).
"""

from typing import Any, Protocol, runtime_checkable

from crosspool.backends.cuda.device.driver import call
from crosspool.backends.cuda.device.executable import Executable
from crosspool.backends.cuda.device.graphs import Capturable, StepGraph, capturing, record

_RUNS_ONCE_AT_LEAST = 1


@runtime_checkable
class Repeatable(Capturable, Protocol):
    """A pass that knows whether it goes on."""

    def advance(self, again: int, *, is_first: bool = False) -> None:
        """Enqueue the kernel that sets the condition `again`: after a step, or before the first."""
        ...


def capture_loop(source: Repeatable, stream: Any, name: str = "pass", *, may_be_skipped: bool = False) -> StepGraph:
    """Capture a pass on `stream` in a loop. As `graphs.capture` otherwise.

    may_be_skipped: a kernel before the loop decides whether its first round runs.
    """
    from cuda.bindings import driver

    with capturing(stream) as cost:
        body = record(source)
        graph = call("cuGraphCreate", 0)
        context = call("cuCtxGetCurrent")
        again = call("cuGraphConditionalHandleCreate", graph, context, _RUNS_ONCE_AT_LEAST, _RUNS_ONCE_AT_LEAST)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        first: list[Any] = []
        if may_be_skipped:
            call("cuStreamBeginCaptureToGraph", stream.cuda_stream, graph, None, None, 0, mode)
            try:
                source.advance(int(again), is_first=True)
            finally:
                call("cuStreamEndCapture", stream.cuda_stream)
            first = call("cuGraphGetNodes", graph, 1)
        node = driver.CUgraphNodeParams()
        node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = again
        node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context
        call("cuGraphAddNode", graph, first or None, None, len(first), node)
        inside = node.conditional.phGraph_out[0]
        step = call("cuGraphAddChildGraphNode", inside, None, 0, driver.CUgraph(body.raw_cuda_graph()))
        call("cuStreamBeginCaptureToGraph", stream.cuda_stream, inside, [step], None, 1, mode)
        try:
            source.advance(int(again))
        finally:
            call("cuStreamEndCapture", stream.cuda_stream)
        executable = Executable(graph, name)
        call("cuGraphDestroy", graph)
    return StepGraph(name, executable, source, body, cost.seconds, cost.num_bytes)
