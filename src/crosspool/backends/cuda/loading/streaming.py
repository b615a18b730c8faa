"""A rank's share of a checkpoint, streamed to its device.

Files that lie in the page cache are read there by the copy engine itself, where their pages can be pinned fast enough
(`registered.py`). Otherwise processes read extents of them into pinned memory (`weights_pool/readers.py`), and one
thread plans them and enqueues the copies from there (`moving.py`). What is under way then keeps the bus busy for two
milliseconds, so that thread may never be away for longer: between two extents of a layer it plans a few parts of the
next one. An extent is so small that the buffers of all readers stay in the processor's caches.
"""

import ctypes
import gc
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch

from crosspool.backends.base import Progress
from crosspool.backends.cuda.device.launch import CudaError
from crosspool.backends.cuda.loading.moving import Moving, pin
from crosspool.backends.cuda.loading.registered import RegisteredFiles, device_pinning, register_files
from crosspool.backends.cuda.loading.share import Room, Share, ShareKey, Tensors, arrange
from crosspool.models.directory import ModelDirectory
from crosspool.models.tensors import Pool
from crosspool.weights_pool.checkpoint import Checkpoint
from crosspool.weights_pool.extents import EXTENT_BYTES, Extent
from crosspool.weights_pool.page_cache import are_cached
from crosspool.weights_pool.readers import Readers

logger = logging.getLogger(__name__)

Copy = Callable[[int, int, int], None]
"""(to address, from address, bytes): enqueued on a stream."""

NUM_READERS = 16
"""Most processes that read: those of a machine with few cores are one fewer than these."""

BUFFER_FACTOR = 1.5
"""A buffer's size in extents: a matrix of an expert that must be arranged may be longer than one."""

NUM_MOVERS = 4
"""Threads that copy where the device is the host: a copy engine is none of them."""

STREAMING = threading.Lock()
"""Held by the one share of a process that streams. A rank that comes back loads all its models at once: they would
halve each other's bus, and their buffers push each other out of the processor's caches."""

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
    may_register: bool = True,
) -> tuple[Tensors, list[Tensors]]:
    """(the model's own tensors, those of each layer): bf16, the router's fp32. also: as `plan_load` takes it.

    room: where tensors lie on `device`; None: in memory of their own. may_register: whether the device may read the
    page cache itself, as it does where a share is whole: pinning takes as long for pages of which a slice is read.
    Host memory beyond the page cache are two buffers a reader. An error leaves nothing allocated.
    """
    key = ShareKey(
        directory=directory,
        pool=pool,
        slice_index=slice_index,
        num_slices=num_slices,
        shares=shares,
        also=also,
    )
    stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
    with _no_collection(), Checkpoint(directory.path) as checkpoint:
        files = _registered(checkpoint, device) if may_register and num_slices == 1 else None
        share = Share(key, device, room)
        if files is not None:
            try:
                _by_registration(share, checkpoint, files, stream, progress, extent_bytes)
                return share.model, share.layers
            except CudaError as failure:
                logger.warning("weights are read by processes after all: %s", failure)
                share = Share(key, device, room)
        _by_readers(share, checkpoint, stream, progress, num_readers, extent_bytes)
    return share.model, share.layers


def _registered(checkpoint: Checkpoint, device: torch.device) -> RegisteredFiles | None:
    """The checkpoint's files, where the device can read them in the page cache fast enough."""
    files = sorted({stored.file for stored in checkpoint.tensors.values()})
    if device.type != "cuda" or not are_cached(files):
        return None
    return register_files(files, device_pinning(device), partial(torch.cuda.set_device, device))


def _by_registration(
    share: Share, checkpoint: Checkpoint, files: RegisteredFiles, stream: Any, progress: Progress, extent_bytes: int
) -> None:
    """Every part is copied out of its file's pages. Copies are enqueued far ahead: nothing has to be free for them."""
    copy, loaded = _copier(share.device, stream), 0

    def plans() -> Iterator[list[Extent] | None]:
        for found in share.plans(checkpoint, extent_bytes):
            if found is not None:
                files.expect(found)
            yield found

    def place(to: int, file: Any, start: int, stop: int) -> None:
        for address, num_bytes in files.runs(file, start, stop):
            copy(to, address, num_bytes)
            to += num_bytes

    try:
        with _turn(lambda: progress(0, share.total)):
            for extent in ahead(plans()):
                for part in extent.parts:
                    to = share.address(part)
                    if to is not None:
                        place(to, part.file, part.start, part.stop)
                        continue
                    with _on(stream):
                        stored = torch.empty(part.stop - part.start, dtype=torch.uint8, device=share.device)
                        place(stored.data_ptr(), part.file, part.start, part.stop)
                        arrange(part, stored, share.target(part))
                loaded += extent.payload_bytes
                progress(loaded, share.total)
    finally:
        if stream is not None:
            stream.synchronize()  # the pages are still read
        files.close()


def _by_readers(
    share: Share, checkpoint: Checkpoint, stream: Any, progress: Progress, num_readers: int, extent_bytes: int
) -> None:
    """Processes read extents into pinned buffers, which are copied from."""
    copy, device = _copier(share.device, stream), share.device

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
        Readers(num_readers, int(BUFFER_FACTOR * extent_bytes)) as readers,
        ThreadPoolExecutor(NUM_MOVERS, thread_name_prefix="crosspool-stream") as movers,
        pin(readers, device, movers) as pinned,
    ):
        work = ahead(share.plans(checkpoint, extent_bytes))
        first = next(work, None)  # a layer is planned while the buffers are pinned
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
