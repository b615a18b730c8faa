"""Host memory in groups, each pinned in one piece, so that one copy brings a layer of weights to a GPU.

The driver takes no copy over two pinned pieces, so a group is one. Pages are touched and pinned by several threads: one
alone pins some 2 GB/s.
"""

import mmap
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from crosspool.backends.cuda.channels.link import Site
from crosspool.backends.cuda.steps.lane import enter
from crosspool.units import MiB, align_up

HUGE_PAGE_BYTES = 2 * MiB
NUM_THREADS = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Bytes [start, stop) of a blob."""

    start: int
    stop: int


class HostBlob:
    """Zeroed host memory. Tensors lie in groups, in the order in which they are put."""

    def __init__(self, site: Site, sizes: Mapping[Hashable, int]) -> None:
        """sizes: bytes of each group. Raises OSError or CudaError where the host has not so much to give."""
        self._site = site
        self.groups: dict[Hashable, Group] = {}
        at = 0
        for name, size in sizes.items():
            self.groups[name] = Group(at, at + align_up(size, HUGE_PAGE_BYTES))
            at = self.groups[name].stop
        self.num_bytes = at
        self._taken = {name: group.start for name, group in self.groups.items()}
        # One huge page more, since a mapping begins at any page.
        self._map = mmap.mmap(-1, at + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages: it only takes longer
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        skipped = -whole.ctypes.data % HUGE_PAGE_BYTES
        self._bytes = whole[skipped : skipped + at]
        self.memory = torch.from_numpy(self._bytes)
        self._pinned: list[int] = []
        try:
            with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="crosspool-pin") as threads:
                list(threads.map(self._pin, self.groups.values()))
        except BaseException:
            self.close()
            raise

    def _pin(self, group: Group) -> None:
        own = self._bytes[group.start : group.stop]
        own[:: mmap.PAGESIZE] = 0
        if self._site.device.type != "cuda":
            return
        from cuda.bindings import driver

        enter(self._site.device)
        self._site.driver.call("cuMemHostRegister", own.ctypes.data, own.nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)
        self._pinned.append(own.ctypes.data)

    def put(self, group: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Room for a tensor in the group. Raises ValueError where it is full."""
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        start = self._taken[group]
        if start + size > self.groups[group].stop:
            raise ValueError(f"group {group} of {self.groups[group]} has no room for {size} bytes at {start}")
        self._taken[group] = align_up(start + size, 256)
        return view(self.memory, start, shape, dtype)

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor lies here; None: elsewhere."""
        at = tensor.data_ptr() - self.memory.data_ptr()
        return at if 0 <= at < self.num_bytes else None

    def close(self) -> None:
        """Unpin. No copy from here may be under way. Raises CudaError; called again, it goes on behind that group."""
        while self._pinned:
            self._site.driver.call("cuMemHostUnregister", self._pinned.pop())


def view(memory: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor in (bytes) uint8 memory."""
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return memory[start : start + size].view(dtype).view(shape)
