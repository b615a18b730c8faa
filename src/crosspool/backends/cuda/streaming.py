"""A rank's share of a checkpoint, streamed to its device by several threads.

One thread moves some 6 GB/s out of the page cache, the bus of a GPU 55 GB/s. So a dozen take extents of the files in
turn, read them into pinned memory without the interpreter's lock, and enqueue the copies from there. An extent is so
small that the blocks of all threads stay in the processor's caches: those of 16 MiB go through main memory. What Python
does for each is little, because all threads share that lock: events and streams are made beforehand. A plan of 58 GB
takes half a second, so the first layers are on their way while the rest is planned.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from queue import SimpleQueue
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

Tensors = dict[str, torch.Tensor]
Copy = Callable[[int, int, int], None]
"""(to address, from address, bytes): enqueued on the stream that was torch's current one when it was made."""
Place = Callable[[Extent, torch.Tensor, Copy], None]
Room = Callable[[int | None, tuple[int, ...], torch.dtype], torch.Tensor]
"""(layer, shape, dtype): zeroed memory for a tensor."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

NUM_THREADS = 12
BUFFERS = 2
"""Pinned blocks of each thread: one is read into while the other is copied from."""


def stream_share(
    directory: ModelDirectory,
    pool: Pool,
    device: torch.device,
    progress: Progress,
    slice_index: int = 0,
    num_slices: int = 1,
    shares: Sequence[float] | None = None,
    num_threads: int = NUM_THREADS,
    extent_bytes: int = EXTENT_BYTES,
    also: Collection[str] = (),
    room: Room | None = None,
) -> tuple[Tensors, list[Tensors]]:
    """(the model's own tensors, those of each layer): bf16, the router's fp32. also: as `plan_load` takes it.

    room: where tensors lie on `device`; None: in memory of their own.
    Host memory beyond the page cache is two blocks a thread. An error leaves nothing allocated.
    """
    model: Tensors = {}
    layers: list[Tensors] = [{} for _ in range(directory.spec.num_layers)]
    total = 0

    def holder(layer: int | None) -> Tensors:
        return model if layer is None else layers[layer]

    def work() -> Iterator[Extent]:
        nonlocal total
        with Checkpoint(directory.path) as checkpoint:
            plan = plan_load(checkpoint, directory, pool, slice_index, num_slices, shares, also=also)
            for destination in plan.destinations:
                name, layer = destination.tensor.name, destination.tensor.layer
                if room is not None:
                    holder(layer)[name] = room(layer, destination.shape, _dtype(name))
                    continue
                make = torch.zeros if destination.is_zero else torch.empty
                holder(layer)[name] = make(destination.shape, dtype=_dtype(name), device=device)
            total = payload_bytes(checkpoint, plan)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # memory freed just now may still be in use there
            wanted = reads(checkpoint, plan, extent_bytes // 2)
            for _, of_layer in groupby(wanted, key=lambda read: read.tensor.layer):
                for extent in extents(checkpoint, of_layer, extent_bytes):
                    yield from shortened(joined(extent, _is_plain), _is_plain, extent_bytes)

    def place(extent: Extent, block: torch.Tensor, copy: Copy) -> None:
        address = block.data_ptr() - extent.start
        for part in extent.parts:
            target = holder(part.read.tensor.layer)[part.read.tensor.name]
            if part.at is not None and _is_plain(part):
                to = target.data_ptr() + part.at * ITEM_BYTES[part.dtype]
                copy(to, address + part.start, part.stop - part.start)
            else:
                arrange(part, block[part.start - extent.start : part.stop - extent.start], target)

    with _no_collection():
        _run(work(), device, place, lambda loaded: progress(loaded, total), num_threads, extent_bytes)
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


def _copier(device: torch.device) -> Copy:
    if device.type != "cuda":

        def move(to: int, source: int, num_bytes: int) -> None:
            ctypes.memmove(to, source, num_bytes)

        return move
    from cuda.bindings import driver

    from crosspool.backends.cuda.launch import CudaError

    stream = torch.cuda.current_stream(device).cuda_stream

    def copy(to: int, source: int, num_bytes: int) -> None:
        (status,) = driver.cuMemcpyHtoDAsync(to, source, num_bytes, stream)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"cuMemcpyHtoDAsync of {num_bytes} bytes to {device} failed: {status.name}")

    return copy


def _run(
    work: Iterator[Extent],
    device: torch.device,
    place: Place,
    told: Callable[[int], None],
    num_threads: int,
    block_bytes: int,
) -> None:
    """Every extent once, the first ones while later ones are still planned.

    `told`, called in the caller's thread, gets the bytes placed; what it or `work` raises ends all.
    """
    todo: SimpleQueue[Extent | None] = SimpleQueue()
    done: SimpleQueue[int | None] = SimpleQueue()
    stop = threading.Event()
    loaded, left = 0, num_threads

    def take() -> Extent | None:
        extent = todo.get()
        return None if stop.is_set() else extent

    def serve() -> None:
        try:
            for extent in _placed(iter(take, None), device, block_bytes, place):
                done.put(extent.payload_bytes)
        except BaseException:
            stop.set()
            raise
        finally:
            done.put(None)

    def note(num_bytes: int | None) -> None:
        nonlocal loaded, left
        left -= num_bytes is None
        if num_bytes is not None:
            loaded += num_bytes
            told(loaded)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="crosspool-stream") as threads:
        futures = [threads.submit(serve) for _ in range(num_threads)]
        try:
            for extent in work:
                todo.put(extent)
                while not done.empty():
                    note(done.get())
                if stop.is_set():
                    break
            for _ in futures:
                todo.put(None)
            while left:
                note(done.get())
        finally:
            stop.set()
            for _ in futures:
                todo.put(None)  # a thread that waits sees that all has ended
        for future in futures:
            future.result()


def _placed(work: Iterator[Extent], device: torch.device, block_bytes: int, place: Place) -> Iterator[Extent]:
    """Each extent once its bytes are on their way to the device; all have arrived at the end."""
    is_cuda = device.type == "cuda"
    stream: Any = None
    if is_cuda:
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)
    blocks = [torch.empty(block_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(BUFFERS)]
    views = [memoryview(block.numpy()) for block in blocks]
    copied: list[Any] = [torch.cuda.Event() if is_cuda else None for _ in blocks]
    with ExtentReader() as reader, _on(stream):
        copy = _copier(device)
        try:
            for number, extent in enumerate(work):
                index = number % BUFFERS
                if is_cuda and number >= BUFFERS:
                    copied[index].synchronize()
                if extent.num_bytes > len(blocks[index]):
                    blocks[index] = torch.empty(extent.num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
                    views[index] = memoryview(blocks[index].numpy())
                reader.read(extent, views[index])
                place(extent, blocks[index], copy)
                if is_cuda:
                    copied[index].record(stream)
                yield extent
        finally:
            if is_cuda:
                stream.synchronize()  # the blocks go back to torch, which does not know of these copies


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
