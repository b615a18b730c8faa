"""A rank's share of a checkpoint, streamed to its device.

Processes read extents of the files into pinned memory (`weights_pool/readers.py`), and one thread plans them and
enqueues the copies from there (`moving.py`). What is under way keeps the bus busy for two milliseconds, so that thread
may never be away for longer: between two extents of a layer it plans a few parts of the next one. An extent is so small
that the buffers of all readers stay in the processor's caches: those of 16 MiB go through main memory.
"""

import ctypes
import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import torch

from crosspool.backends.base import Progress
from crosspool.backends.cuda.loading.moving import Moving, pin
from crosspool.models.directory import ModelDirectory
from crosspool.models.tensors import FLOAT32_TENSORS, Pool
from crosspool.weights_pool.checkpoint import ITEM_BYTES, Checkpoint
from crosspool.weights_pool.extents import EXTENT_BYTES, Extent, Part, extents, joined, shortened
from crosspool.weights_pool.loader import payload_bytes, plan_load
from crosspool.weights_pool.parts import parts
from crosspool.weights_pool.readers import Readers

Tensors = dict[str, torch.Tensor]
Copy = Callable[[int, int, int], None]
"""(to address, from address, bytes): enqueued on a stream."""
Room = Callable[[int | None, tuple[int, ...], torch.dtype], torch.Tensor]
"""(layer, shape, dtype): zeroed memory for a tensor."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

NUM_READERS = 16
"""Most processes that read: those of a machine with few cores are one fewer than these."""

BUFFER_FACTOR = 1.5
"""A buffer's size in extents: a matrix of an expert that must be arranged may be longer than one."""

NUM_MOVERS = 4
"""Threads that copy where the device is the host: a copy engine is none of them."""

STREAMING = threading.Lock()
"""Held by the one share of a process that streams. A rank that comes back loads all its models at once: their readers
would halve each other's bus, and their buffers push each other out of the processor's caches."""

TURN_LOOK_S = 0.05

PARTS_AT_ONCE = 2
"""Parts of the next layer that are planned between two extents: about as many as an extent has."""


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

    def plans() -> Iterator[list[Extent] | None]:
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
                members: list[Part] = []
                for member in parts(checkpoint, part, extent_bytes // 2, _is_plain):
                    members.append(member)
                    if len(members) % PARTS_AT_ONCE == 0:
                        yield None
                whole = (joined(extent, _is_plain) for extent in extents(members, extent_bytes))
                yield [each for extent in whole for each in shortened(extent, _is_plain, extent_bytes)]

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
            ThreadPoolExecutor(NUM_MOVERS, thread_name_prefix="crosspool-stream") as movers,
            pin(readers, device, movers) as pinned,
        ):
            work = ahead(plans())
            first = next(work, None)  # the files are opened and a layer is planned while the buffers are pinned
            buffers = pinned.result()
            with _turn(lambda: progress(0, total)):
                moving = Moving(readers, buffers, stream, movers, place, lambda loaded: progress(loaded, total))
                try:
                    for extent in work if first is None else chain([first], work):
                        moving.add(extent)
                    moving.finish()
                finally:
                    if stream is not None:
                        stream.synchronize()  # the buffers are still read
    return model, layers


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
