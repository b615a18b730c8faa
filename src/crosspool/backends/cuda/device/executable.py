"""Executable: a captured graph that the driver itself launches."""

import weakref
from typing import Any

from crosspool.backends.cuda.device.driver import CudaError, call


class Executable:
    """A graph made ready for its device. It outlives `graph`, but not what was allocated while that was captured.

    torch's replay looks for the current stream and device, and at its random state, which takes the host longer than
    the launch.
    """

    def __init__(self, graph: Any, what: str) -> None:
        """graph: the driver's, or the number that torch gives of it. what: names it in errors, its rank first."""
        from cuda.bindings import driver

        own = driver.CUgraph(graph) if isinstance(graph, int) else graph
        handle = call("cuGraphInstantiate", own, 0, what=what)
        self._what, self._handle = what, handle
        self._launch, self._success = driver.cuGraphLaunch, driver.CUresult.CUDA_SUCCESS
        weakref.finalize(self, driver.cuGraphExecDestroy, handle).atexit = False  # then the context is gone too

    def launch(self, stream: Any) -> None:
        """Enqueue it on torch's `stream`. Raises CudaError."""
        (status,) = self._launch(self._handle, stream.cuda_stream)
        if status != self._success:
            raise CudaError(f"cuGraphLaunch of {self._what} failed: {status.name}")
