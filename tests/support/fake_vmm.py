"""A driver of virtual memory in Python: cuda-bindings' signatures, strict about misuse, failing when told to.

Contents belong to physical memory: what is written through one address is read through whatever address the same memory
is mapped at later.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from typing import Any


class Status(IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    UNKNOWN = 999


class FakeVmmDriver:
    """Every size and address is a multiple of `frame_bytes`. `fails(name)` gives the status of a call to come."""

    def __init__(
        self,
        frame_bytes: int,
        fails: Callable[[str], Status] = lambda name: Status.SUCCESS,
        slow_s: dict[str, float] | None = None,
        max_frames: int | None = None,
    ) -> None:
        self.frame_bytes = frame_bytes
        self.fails = fails
        self.slow_s = slow_s or {}
        self.max_frames = max_frames
        self.calls: Counter[str] = Counter()
        self.misuse: list[str] = []
        self.reserved: dict[int, int] = {}  # address -> bytes
        self.mapped: dict[int, int] = {}  # address of a frame -> handle
        self.accessible: set[int] = set()
        self.contents: dict[int, Any] = {}  # by handle
        self._next_address = 1 << 40
        self._next_handle = 1

    def write(self, address: int, value: Any) -> None:
        """As a kernel would; AssertionError in place of a fault."""
        assert address in self.accessible, f"a kernel wrote to {address:#x}, where nothing is mapped"
        self.contents[self.mapped[address]] = value

    def read(self, address: int) -> Any:
        assert address in self.accessible, f"a kernel read from {address:#x}, where nothing is mapped"
        return self.contents[self.mapped[address]]

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> tuple[Any, ...]:
        if status := self._begin("cuMemAddressReserve"):
            return (status, 0)
        address = self._next_address
        self._next_address += size + self.frame_bytes  # so that ranges do not touch
        self.reserved[address] = size
        return (Status.SUCCESS, address)

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[Any, ...]:
        if status := self._begin("cuMemAddressFree"):
            return (status,)
        if self.reserved.get(ptr) != size or any(address in self.mapped for address in self._frames(ptr, size)):
            return self._misused("cuMemAddressFree", ptr, size)
        del self.reserved[ptr]
        return (Status.SUCCESS,)

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:
        if status := self._begin("cuMemCreate"):
            return (status, 0)
        if self.max_frames is not None and len(self.contents) >= self.max_frames:
            return (Status.OUT_OF_MEMORY, 0)
        handle = self._next_handle
        self._next_handle += 1
        self.contents[handle] = None
        return (Status.SUCCESS, handle)

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        if status := self._begin("cuMemRelease"):
            return (status,)
        if handle not in self.contents:
            return self._misused("cuMemRelease", handle, 0)
        del self.contents[handle]
        return (Status.SUCCESS,)

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: Any, flags: int) -> tuple[Any, ...]:
        if status := self._begin("cuMemMap"):
            return (status,)
        if size != self.frame_bytes or ptr in self.mapped or handle not in self.contents or not self._is_reserved(ptr):
            return self._misused("cuMemMap", ptr, size)
        self.mapped[ptr] = handle
        return (Status.SUCCESS,)

    def cuMemSetAccess(self, ptr: int, size: int, desc: Any, count: int) -> tuple[Any, ...]:
        if status := self._begin("cuMemSetAccess"):
            return (status,)
        frames = self._frames(ptr, size)
        if count != len(desc) or not all(address in self.mapped for address in frames):
            return self._misused("cuMemSetAccess", ptr, size)
        self.accessible.update(frames)
        return (Status.SUCCESS,)

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:
        if status := self._begin("cuMemUnmap"):
            return (status,)
        frames = self._frames(ptr, size)
        if not all(address in self.mapped for address in frames):
            return self._misused("cuMemUnmap", ptr, size)
        for address in frames:
            del self.mapped[address]
            self.accessible.discard(address)
        return (Status.SUCCESS,)

    def allocation_properties(self) -> Any:
        return "properties"

    def access_descriptors(self) -> list[Any]:
        return ["device 0"]

    def _begin(self, name: str) -> Status:
        self.calls[name] += 1
        if (seconds := self.slow_s.get(name)) is not None:
            time.sleep(seconds)
        return self.fails(name)

    def _misused(self, name: str, *arguments: int) -> tuple[Any, ...]:
        self.misuse.append(f"{name}{arguments}")
        return (Status.INVALID_VALUE,)

    def _frames(self, ptr: int, size: int) -> range:
        return range(ptr, ptr + size, self.frame_bytes)

    def _is_reserved(self, ptr: int) -> bool:
        return any(start <= ptr < start + size for start, size in self.reserved.items())
