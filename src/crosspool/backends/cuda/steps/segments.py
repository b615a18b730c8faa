"""A pass that the host drives: a graph for each half of a layer, launched once the crossing before it has arrived.

What the paper calls a scheduler without persistent kernels. The kernels are those of a whole pass's graph; between two
halves one more tells the host of the crossing, and the host's turn is then part of every layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crosspool.backends.base import Wait
from crosspool.backends.cuda.channels.link import DeviceInlet
from crosspool.backends.cuda.channels.transport_params import Flags, SeeParams
from crosspool.backends.cuda.device.executable import Executable
from crosspool.backends.cuda.device.graphs import Capturable, capturing
from crosspool.backends.cuda.device.launch import Launcher
from crosspool.backends.cuda.steps.lane_memory import LaneMemory


@dataclass(frozen=True)
class SegmentGraphs:
    """The halves of a pass in order. `num_bytes`: device memory that capturing took."""

    name: str
    halves: tuple[Executable, ...]
    source: Capturable  # its buffers are the graphs'
    bodies: tuple[Any, ...]  # torch's graphs, as in `StepGraph`
    num_bytes: int

    def drive(self, stream: Any, memory: LaneMemory, inlets: Sequence[DeviceInlet], base: int) -> Iterator[Wait]:
        """Launch each half on `stream` once the crossing that it needs has arrived; flags carry base + layer + 1."""
        try:
            for layer, half in enumerate(self.halves):
                half.launch(stream)
                if layer + 1 < len(self.halves):
                    epoch = base + layer + 1
                    for inlet in inlets:
                        inlet.has_come = lambda epoch=epoch: memory.seen_epoch >= epoch
                    yield Wait(inlets, epoch)
        finally:
            for inlet in inlets:
                inlet.has_come = None


def see(kernels: Launcher, lane: LaneMemory, flags: Sequence[int], layer: int) -> None:
    """Wait for the layer's flags at these addresses, of peers in order, and tell the host (`LaneMemory.seen_epoch`)."""
    params = SeeParams(view=lane.view(), flags=Flags.at(flags), layer=layer)
    kernels.launch("lane_steps", "see", grid=(1, 1, 1), threads=32, smem_bytes=0, params=params)


def capture_segments(
    source: Capturable, stream: Any, kernels: Launcher, lane: LaneMemory, flags: Sequence[int], name: str
) -> SegmentGraphs:
    """Capture a pass on `stream`, cut where it waits for a crossing. As `graphs.capture` otherwise."""
    graphs: list[Any] = []
    pool: Any = None

    def begin() -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        graphs.append(graph)

    with capturing(stream) as cost:
        begin()
        try:
            for layer in source.kernels():
                see(kernels, lane, flags, layer)
                graphs[-1].capture_end()
                pool = graphs[0].pool()
                begin()
        finally:
            graphs[-1].capture_end()
        halves = tuple([Executable(graph.raw_cuda_graph(), name) for graph in graphs])
    return SegmentGraphs(name, halves, source, tuple(graphs), cost.num_bytes)
