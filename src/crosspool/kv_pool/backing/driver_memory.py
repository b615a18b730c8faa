"""DriverMemory: physical memory of frames, and ranges of addresses in which it is mapped. What fails is undone.

Any call may come from another thread than the last, but one at a time for each frame and each range.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crosspool.kv_pool.backing.driver import DriverError, VmmDriver, call

logger = logging.getLogger(__name__)


class DriverMemory:
    """`num_frames` frames of `frame_bytes` bytes each, created at once. Every range begins with frame 0.

    Raises DriverError if the memory cannot be created.
    """

    def __init__(self, driver: VmmDriver, num_frames: int, frame_bytes: int) -> None:
        self._driver = driver
        self._num_frames = num_frames
        self._frame_bytes = frame_bytes
        self._access = driver.access_descriptors()
        self._properties = driver.allocation_properties()
        self._handles: list[Any] = []  # by frame; None: without memory
        self._ranges: dict[int, int] = {}  # base -> bytes, of every range not yet freed
        self._aliases: set[int] = set()  # bases at which frame 0 is mapped
        self._broken: set[int] = set()  # bases of ranges that nobody got, and that are to be freed
        self._leftovers: dict[int, int] = {}  # address -> bytes, mapped and in nobody's spot
        self._create_all()

    def _create_all(self) -> None:
        try:
            for _ in range(self._num_frames):
                self._handles.append(self._memory_of_a_frame())
        except DriverError as error:
            created = len(self._handles)
            for handle in self._handles:
                call(self._driver, "cuMemRelease", handle)
            raise type(error)(
                f"{error} after {created} of {self._num_frames} frames of {self._frame_bytes} bytes; "
                "lower kv_pool_bytes"
            ) from None

    def _memory_of_a_frame(self) -> Any:
        return call(self._driver, "cuMemCreate", self._frame_bytes, self._properties, 0)

    def create_frame(self, frame: int) -> None:
        """Give a frame memory again. Raises DriverError."""
        self._handles[frame] = self._memory_of_a_frame()

    def release_frame(self, frame: int) -> None:
        """Give a frame's memory back to the driver; it is mapped nowhere. Raises DriverError."""
        call(self._driver, "cuMemRelease", self._handles[frame])
        self._handles[frame] = None

    def reserve_range(self, num_frames: int) -> int:
        """Base of a new range of addresses, frame 0 mapped at it. Raises DriverError, and then nothing is reserved."""
        for broken in list(self._broken):
            self._quietly(self.free_range, broken)
        num_bytes = num_frames * self._frame_bytes
        base = int(call(self._driver, "cuMemAddressReserve", num_bytes, 0, 0, 0))
        self._ranges[base] = num_bytes
        try:
            self._map(base, [self._handles[0]])
        except DriverError:
            self._broken.add(base)
            self._quietly(self.free_range, base)
            raise
        self._aliases.add(base)
        return base

    def free_range(self, base: int) -> None:
        """Give a range's addresses back. Raises DriverError; called again, it goes on from where it failed."""
        num_bytes = self._ranges[base]
        for address in [found for found in list(self._leftovers) if base <= found < base + num_bytes]:
            call(self._driver, "cuMemUnmap", address, self._leftovers[address])
            del self._leftovers[address]
        if base in self._aliases:
            call(self._driver, "cuMemUnmap", base, self._frame_bytes)
            self._aliases.discard(base)
        call(self._driver, "cuMemAddressFree", base, num_bytes)
        del self._ranges[base]
        self._broken.discard(base)

    def map_frames(self, address: int, frames: Sequence[int]) -> None:
        """Map frames side by side and let the device use them; all or none. Raises DriverError."""
        self._map(address, [self._handles[frame] for frame in frames])

    def unmap_frames(self, address: int, num_frames: int) -> None:
        """Raises DriverError."""
        call(self._driver, "cuMemUnmap", address, num_frames * self._frame_bytes)

    def _map(self, base: int, handles: list[Any]) -> None:
        if base in self._leftovers:  # a failed attempt that could not be undone
            call(self._driver, "cuMemUnmap", base, self._leftovers[base])
            del self._leftovers[base]
        num_mapped = 0
        try:
            for handle in handles:
                address = base + num_mapped * self._frame_bytes
                call(self._driver, "cuMemMap", address, self._frame_bytes, 0, handle, 0)
                num_mapped += 1
            num_bytes = len(handles) * self._frame_bytes
            call(self._driver, "cuMemSetAccess", base, num_bytes, self._access, len(self._access))
        except DriverError:
            if num_mapped:
                self._leftovers[base] = num_mapped * self._frame_bytes
                call(self._driver, "cuMemUnmap", base, num_mapped * self._frame_bytes)
                del self._leftovers[base]
            raise

    def close(self, mapped: Iterable[tuple[int, int]]) -> None:
        """Free everything. mapped: (address, number of frames) of what is still mapped beside frame 0."""
        for address, num_frames in mapped:
            self._quietly(self.unmap_frames, address, num_frames)
        for base in list(self._ranges):
            self._quietly(self.free_range, base)
        while self._handles:
            handle = self._handles.pop()
            if handle is not None:
                self._quietly(call, self._driver, "cuMemRelease", handle)

    def _quietly(self, free: Callable[..., Any], *arguments: Any) -> None:
        try:
            free(*arguments)
        except DriverError as error:  # the process lets go of it at its end
            logger.warning("not freed: %s", error)
