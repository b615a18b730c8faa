"""Extents on their way to a device: read by processes into pinned buffers, copied from there."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from crosspool.backends.cuda.device.driver import call
from crosspool.weights_pool.extents import Extent, ExtentReader
from crosspool.weights_pool.readers import BUFFERS_EACH, Readers

Place = Callable[[Extent, torch.Tensor], None]
"""Enqueues the copies of an extent whose bytes are at the beginning of a block of host memory."""


@dataclass(frozen=True, slots=True)
class _MovedByThread:
    """A copy by a thread, as an event of a stream."""

    future: Future[None]

    def query(self) -> bool:
        return self.future.done() and self.future.result() is None

    def synchronize(self) -> None:
        self.future.result()


class Moving:
    """Extents on their way: being read into a buffer, or copied from it.

    told: gets the bytes placed so far; what it raises ends all.
    """

    def __init__(
        self,
        readers: Readers,
        buffers: torch.Tensor,
        stream: Any,
        movers: Executor,
        place: Place,
        told: Callable[[int], None],
    ) -> None:
        """buffers: (buffers, bytes of one) uint8, the readers' memory. stream: that `place` enqueues on.

        movers: call `place` where there is no stream.
        """
        self._readers, self._buffers, self._stream, self._place, self._told = readers, buffers, stream, place, told
        self._movers = movers
        self._free = deque(
            sorted(range(len(buffers)), key=lambda buffer: (buffer % BUFFERS_EACH, buffer))
        )  # all readers first
        self._reading: dict[int, Extent] = {}
        self._copying: deque[int] = deque()
        self._copied: list[Any] = [None if stream is None else torch.cuda.Event() for _ in buffers]
        self._loaded = 0

    def add(self, extent: Extent) -> None:
        """Have it read; returns once it has a buffer."""
        if extent.num_bytes > self._buffers.shape[1]:
            self._alone(extent)
            return
        buffer = self._free_buffer()
        self._reading[buffer] = extent
        self._readers.read(extent, buffer)
        self._place_ended(wait=False)

    def finish(self) -> None:
        """Returns once all has arrived."""
        while self._reading:
            self._place_ended(wait=True)
        for buffer in self._copying:
            self._copied[buffer].synchronize()

    def _free_buffer(self) -> int:
        while True:
            while self._copying and self._copied[self._copying[0]].query():
                self._free.append(self._copying.popleft())
            if self._free:
                return self._free.popleft()
            if self._reading:
                self._place_ended(wait=True)
            else:
                self._copied[self._copying[0]].synchronize()

    def _place_ended(self, *, wait: bool) -> None:
        for buffer, is_there in self._readers.ended(wait=wait):
            extent, block = self._reading.pop(buffer), self._buffers[buffer]
            if not is_there:
                _read(extent, block)
            if self._stream is None:
                self._copied[buffer] = _MovedByThread(self._movers.submit(self._place, extent, block))
            else:
                self._place(extent, block)
                self._copied[buffer].record(self._stream)
            self._copying.append(buffer)
            self._count(extent)

    def _alone(self, extent: Extent) -> None:
        """One that no buffer holds: a long matrix which must be arranged."""
        block = torch.empty(extent.num_bytes, dtype=torch.uint8)
        _read(extent, block)
        self._place(extent, block)
        if self._stream is not None:
            self._stream.synchronize()
        self._count(extent)

    def _count(self, extent: Extent) -> None:
        self._loaded += extent.payload_bytes
        self._told(self._loaded)


def _read(extent: Extent, block: torch.Tensor) -> None:
    with ExtentReader() as reader:
        reader.read(extent, memoryview(block.numpy()))


@contextmanager
def pin(readers: Readers, device: torch.device, threads: Executor) -> Iterator[Future[torch.Tensor]]:
    """(buffers, bytes of one) uint8: the readers' memory, which one of `threads` pins where there is a GPU."""
    buffers = torch.frombuffer(readers.memory, dtype=torch.uint8).view(readers.num_buffers, readers.buffer_bytes)
    pinned = threads.submit(_pin, readers, buffers, device)
    try:
        yield pinned
    finally:
        if device.type == "cuda" and pinned.exception() is None:
            from cuda.bindings import driver

            driver.cuMemHostUnregister(buffers.data_ptr())


def _pin(readers: Readers, buffers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same. Raises CudaError where the driver refuses."""
    if device.type != "cuda":
        return buffers
    readers.touch()
    torch.cuda.set_device(device)
    what = f"{buffers.nbytes} bytes for {device}"
    call("cuMemHostRegister", buffers.data_ptr(), buffers.nbytes, 0, what=what)
    return buffers
