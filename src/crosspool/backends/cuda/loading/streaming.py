"""A rank's share of a checkpoint, streamed to its device.

Processes read extents of the files into pinned memory (`weights_pool/readers.py`), and one thread plans them, layer by
layer, and enqueues the copies from there: so the first layers are on their way while the rest is planned. An extent is
so small that the buffers of all readers stay in the processor's caches: those of 16 MiB go through main memory.
"""

import ctypes
import gc
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from crosspool.backends.base import Progress
from crosspool.models.directory import ModelDirectory
from crosspool.models.tensors import FLOAT32_TENSORS, Pool
from crosspool.weights_pool.checkpoint import Checkpoint
from crosspool.weights_pool.extents import (
    EXTENT_BYTES,
    ITEM_BYTES,
    Extent,
    ExtentReader,
    Part,
    extents,
    joined,
    shortened,
)
from crosspool.weights_pool.loader import payload_bytes, plan_load, reads
from crosspool.weights_pool.readers import BUFFERS_EACH, Readers

Tensors = dict[str, torch.Tensor]
Copy = Callable[[int, int, int], None]
"""(to address, from address, bytes): enqueued on a stream."""
Room = Callable[[int | None, tuple[int, ...], torch.dtype], torch.Tensor]
"""(layer, shape, dtype): zeroed memory for a tensor."""
Place = Callable[[Extent, torch.Tensor], None]
"""Enqueues the copies of an extent whose bytes are at the beginning of a block of host memory."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

NUM_READERS = 16
"""Most processes that read: those of a machine with few cores are one fewer than these."""

BUFFER_FACTOR = 1.5
"""A buffer's size in extents: a matrix of an expert that must be arranged may be longer than one."""

NUM_MOVERS = 4
"""Threads that copy where the device is the host: a copy engine is none of them."""


def stream_share(
    directory: ModelDirectory,
    pool: Pool,
    device: torch.device,
    progress: Progress,
    slice_index: int = 0,
    num_slices: int = 1,
    shares: Sequence[float] | None = None,
    num_readers: int = NUM_READERS,
    extent_bytes: int = EXTENT_BYTES,
    also: Collection[str] = (),
    room: Room | None = None,
) -> tuple[Tensors, list[Tensors]]:
    """(the model's own tensors, those of each layer): bf16, the router's fp32. also: as `plan_load` takes it.

    room: where tensors lie on `device`; None: in memory of their own.
    Host memory beyond the page cache are two buffers a reader. An error leaves nothing allocated.
    """
    model: Tensors = {}
    layers: list[Tensors] = [{} for _ in range(directory.spec.num_layers)]
    total = 0
    stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
    copy = _copier(device, stream)

    def holder(layer: int | None) -> Tensors:
        return model if layer is None else layers[layer]

    def work() -> Iterator[Extent]:
        nonlocal total
        with Checkpoint(directory.path) as checkpoint:
            plan = plan_load(checkpoint, directory, pool, slice_index, num_slices, shares, also=also)
            total = payload_bytes(checkpoint, plan)
            for layer, destinations in groupby(plan.destinations, key=lambda each: each.tensor.layer):
                part = replace(plan, destinations=tuple(destinations))
                for destination in part.destinations:
                    name = destination.tensor.name
                    if room is not None:
                        holder(layer)[name] = room(layer, destination.shape, _dtype(name))
                        continue
                    make = torch.zeros if destination.is_zero else torch.empty
                    holder(layer)[name] = make(destination.shape, dtype=_dtype(name), device=device)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()  # memory freed just now may still be in use there
                for extent in extents(checkpoint, reads(checkpoint, part, extent_bytes // 2), extent_bytes):
                    yield from shortened(joined(extent, _is_plain), _is_plain, extent_bytes)

    def place(extent: Extent, block: torch.Tensor) -> None:
        address = block.data_ptr() - extent.start
        for part in extent.parts:
            target = holder(part.read.tensor.layer)[part.read.tensor.name]
            if part.at is not None and _is_plain(part):
                to = target.data_ptr() + part.at * ITEM_BYTES[part.dtype]
                copy(to, address + part.start, part.stop - part.start)
            else:
                with _on(stream):
                    arrange(part, block[part.start - extent.start : part.stop - extent.start], target)

    with _no_collection():
        num_readers = max(1, min(num_readers, (os.cpu_count() or 2) - 1))
        with (
            Readers(num_readers, int(BUFFER_FACTOR * extent_bytes)) as readers,
            _pinned(readers, device) as buffers,
            ThreadPoolExecutor(NUM_MOVERS, thread_name_prefix="crosspool-stream") as movers,
        ):
            loading = _Loading(readers, buffers, stream, movers, place, lambda loaded: progress(loaded, total))
            try:
                for extent in work():
                    loading.add(extent)
                loading.finish()
            finally:
                if stream is not None:
                    stream.synchronize()  # the buffers are still read
    return model, layers


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name in FLOAT32_TENSORS else torch.bfloat16


def _is_plain(part: Part) -> bool:
    """Whether what is stored is what is held."""
    return DTYPES[part.dtype] == _dtype(part.read.tensor.name)


def arrange(part: Part, block: torch.Tensor, destination: torch.Tensor) -> None:
    """Put a part, its bytes in host memory, where it belongs: cut, turned and cast on the device."""
    region = part.read.region
    whole = block.to(destination.device, non_blocking=True, copy=True)
    value = torch.as_strided(whole.view(DTYPES[part.dtype]), part.shape, part.strides)
    if region.pick:
        value = value[region.pick]
    if region.transpose:
        value = value.transpose(-1, -2)
    destination[region.index].copy_(value if value.ndim == len(region.index) else value.unsqueeze(0))


def _copier(device: torch.device, stream: Any) -> Copy:
    if device.type != "cuda":

        def move(to: int, source: int, num_bytes: int) -> None:
            ctypes.memmove(to, source, num_bytes)

        return move
    from cuda.bindings import driver

    from crosspool.backends.cuda.device.launch import CudaError

    handle = stream.cuda_stream

    def copy(to: int, source: int, num_bytes: int) -> None:
        (status,) = driver.cuMemcpyHtoDAsync(to, source, num_bytes, handle)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"cuMemcpyHtoDAsync of {num_bytes} bytes to {device} failed: {status.name}")

    return copy


@dataclass(frozen=True, slots=True)
class _Moving:
    """A copy by a thread, as an event of a stream."""

    future: Future[None]

    def query(self) -> bool:
        return self.future.done() and self.future.result() is None

    def synchronize(self) -> None:
        self.future.result()


class _Loading:
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
                self._copied[buffer] = _Moving(self._movers.submit(self._place, extent, block))
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
def _pinned(readers: Readers, device: torch.device) -> Iterator[torch.Tensor]:
    """(buffers, bytes of one) uint8: the readers' memory, pinned where there is a GPU."""
    buffers = torch.frombuffer(readers.memory, dtype=torch.uint8).view(readers.num_buffers, readers.buffer_bytes)
    if device.type != "cuda":
        yield buffers
        return
    from cuda.bindings import driver

    from crosspool.backends.cuda.device.launch import CudaError

    torch.cuda.set_device(device)
    (status,) = driver.cuMemHostRegister(buffers.data_ptr(), buffers.nbytes, 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"cuMemHostRegister of {buffers.nbytes} bytes for {device} failed: {status.name}")
    try:
        yield buffers
    finally:
        driver.cuMemHostUnregister(buffers.data_ptr())


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector off: a plan is ten thousands of small objects, and looking at them doubles its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
