"""A rank's share of a checkpoint, streamed to its device.

Processes read extents of the files into pinned memory (`weights_pool/readers.py`), and one thread plans them and
enqueues the copies from there (`moving.py`). What is under way keeps the bus busy for two milliseconds, so that thread
may never be away for longer: between two extents of a layer it plans a few parts of the next one. An extent is so small
that the buffers of all readers stay in the processor's caches: those of 16 MiB go through main memory. Pinning the page
cache's own pages, for the copy engine to read them there, gave 5 to 16 GB/s: pages are pinned at up to 47, but hardly
while copies run.
"""

import ctypes
import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from crosspool.backends.base import Progress
from crosspool.backends.cuda.device.driver import CudaError
from crosspool.backends.cuda.device.queues import stream_for
from crosspool.backends.cuda.loading.moving import Moving, pin
from crosspool.backends.cuda.loading.share import Room, Share, Tensors, arrange
from crosspool.models.directory import ModelDirectory
from crosspool.models.tensors import Pool
from crosspool.weights_pool.checkpoint import Checkpoint
from crosspool.weights_pool.extents import EXTENT_BYTES, Extent
from crosspool.weights_pool.loader import LoadPlan, plan_load
from crosspool.weights_pool.readers import Readers

Copy = Callable[[int, int, int], None]
"""(to address, from address, bytes): enqueued on a stream."""

NUM_READERS = 16
"""Most processes that read: those of a machine with few cores are one fewer than these."""

BUFFER_FACTOR = 1.5
"""A buffer's size in extents: a matrix of an expert that must be arranged may be longer than one."""

NUM_MOVERS = 4
"""Threads that copy where the device is the host: a copy engine is none of them."""

STREAMING = threading.Lock()
"""Held by the one share of a process that streams. Loads that were asked for at once would halve each other's bus, and
their buffers push each other out of the processor's caches."""

TURN_LOOK_S = 0.05


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

    def make_plan(checkpoint: Checkpoint) -> LoadPlan:
        return plan_load(checkpoint, directory, pool, slice_index, num_slices, shares, also=also)

    share = Share(directory.spec.num_layers, make_plan, device, room)
    stream: Any = stream_for("loads", device) if device.type == "cuda" else None
    copy = _copier(device, stream)

    def place(extent: Extent, block: torch.Tensor) -> None:
        address = block.data_ptr() - extent.start
        for part in extent.parts:
            to = share.address(part)
            if to is not None:
                copy(to, address + part.start, part.stop - part.start)
                continue
            with _on(stream):
                stored = block[part.start - extent.start : part.stop - extent.start]
                arrange(part, stored.to(device, non_blocking=True, copy=True), share.target(part))

    num_readers = max(1, min(num_readers, (os.cpu_count() or 2) - 1))
    with (
        _no_collection(),
        Readers(num_readers, int(BUFFER_FACTOR * extent_bytes)) as readers,
        ThreadPoolExecutor(NUM_MOVERS, thread_name_prefix="crosspool-stream") as movers,
        pin(readers, device, movers) as pinned,
        Checkpoint(directory.path) as checkpoint,
    ):
        work = ahead(share.plans(checkpoint, extent_bytes))
        first = next(work, None)  # files are opened and a layer is planned while readers start and buffers are pinned
        buffers = pinned.result()
        with _turn(lambda: progress(0, share.total)):
            moving = Moving(readers, buffers, stream, movers, place, lambda loaded: progress(loaded, share.total))
            try:
                for extent in work if first is None else chain([first], work):
                    moving.add(extent)
                moving.finish()
            finally:
                if stream is not None:
                    stream.synchronize()  # the buffers are still read
    return share.model, share.layers


@contextmanager
def _turn(look: Callable[[], None]) -> Iterator[None]:
    """Hold STREAMING. look: called while others have it; raises where the load was given up."""
    while not STREAMING.acquire(timeout=TURN_LOOK_S):
        look()
    try:
        yield
    finally:
        STREAMING.release()


def ahead(plans: Iterator[list[Extent] | None]) -> Iterator[Extent]:
    """The extents of plans, one for each None, so that a plan is made bit by bit while the one before it goes out.

    plans: gives None between the bits.
    """
    ready: deque[Extent] = deque()
    for found in plans:
        if found is not None:
            ready.extend(found)
        elif ready:
            yield ready.popleft()
    yield from ready


def _copier(device: torch.device, stream: Any) -> Copy:
    if device.type != "cuda":

        def move(to: int, source: int, num_bytes: int) -> None:
            ctypes.memmove(to, source, num_bytes)

        return move
    from cuda.bindings import driver

    handle = stream.cuda_stream

    def copy(to: int, source: int, num_bytes: int) -> None:
        (status,) = driver.cuMemcpyHtoDAsync(to, source, num_bytes, handle)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"cuMemcpyHtoDAsync of {num_bytes} bytes to {device} failed: {status.name}")

    return copy


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
