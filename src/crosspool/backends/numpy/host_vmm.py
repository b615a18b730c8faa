"""HostVmmDriver: cuda-bindings' virtual memory calls on host memory, by mmap of an anonymous file. Linux only.

Physical memory is a piece of the file; mapping it somewhere else moves its contents with it, as on a GPU. What is
touched and not mapped is a segmentation fault, as it should be.
"""

import ctypes
import mmap
import os
from enum import IntEnum
from typing import Any

import numpy as np

from crosspool.backends.numpy.kv_cache import Arena
from crosspool.kv_pool.backing.base import FrameRange

PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value
FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2


class HostStatus(IntEnum):
    """Statuses of the driver's calls, with CUDA's numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class HostVmmDriver:
    """Implements `kv_pool.backing.driver.VmmDriver`. Sizes are multiples of the system's page."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
            ctypes.c_int64,
        )
        for name in ("munmap", "mprotect"):
            getattr(self._libc, name).argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * (name[1] == "p"))
        self._libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        self._file = os.memfd_create("crosspool-kv", os.MFD_CLOEXEC)
        self._end = 0
        self._sizes: dict[int, int] = {}  # handle, the offset in the file -> bytes

    def close(self) -> None:
        """Mappings that are left stay valid."""
        os.close(self._file)

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> tuple[Any, ...]:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        address = self._libc.mmap(None, size, PROT_NONE, private, -1, 0)
        return (HostStatus.CUDA_ERROR_OUT_OF_MEMORY, 0) if address == MAP_FAILED else (HostStatus.CUDA_SUCCESS, address)

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[Any, ...]:
        return (self._status(self._libc.munmap(ptr, size)),)

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:
        if size % mmap.PAGESIZE:
            return (HostStatus.CUDA_ERROR_INVALID_VALUE, 0)
        handle = self._end
        try:
            os.ftruncate(self._file, handle + size)
        except OSError:
            return (HostStatus.CUDA_ERROR_OUT_OF_MEMORY, 0)
        self._end += size
        self._sizes[handle] = size
        return (HostStatus.CUDA_SUCCESS, handle)

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        size = self._sizes.pop(handle, None)
        if size is None:
            return (HostStatus.CUDA_ERROR_INVALID_VALUE,)
        hole = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
        return (self._status(self._libc.fallocate(self._file, hole, handle, size)),)

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: Any, flags: int) -> tuple[Any, ...]:
        if offset + size > self._sizes.get(handle, 0):
            return (HostStatus.CUDA_ERROR_INVALID_VALUE,)
        found = self._libc.mmap(ptr, size, PROT_NONE, mmap.MAP_SHARED | MAP_FIXED, self._file, handle + offset)
        return (HostStatus.CUDA_ERROR_OUT_OF_MEMORY if found == MAP_FAILED else HostStatus.CUDA_SUCCESS,)

    def cuMemSetAccess(self, ptr: int, size: int, desc: Any, count: int) -> tuple[Any, ...]:
        return (self._status(self._libc.mprotect(ptr, size, mmap.PROT_READ | mmap.PROT_WRITE)),)

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE
        found = self._libc.mmap(ptr, size, PROT_NONE, private, -1, 0)
        return (HostStatus.CUDA_ERROR_OUT_OF_MEMORY if found == MAP_FAILED else HostStatus.CUDA_SUCCESS,)

    def allocation_properties(self) -> Any:
        return None

    def access_descriptors(self) -> list[Any]:
        return [None]

    def _status(self, result: int) -> HostStatus:
        if result == 0:
            return HostStatus.CUDA_SUCCESS
        is_full = ctypes.get_errno() == 12  # ENOMEM
        return HostStatus.CUDA_ERROR_OUT_OF_MEMORY if is_full else HostStatus.CUDA_ERROR_INVALID_VALUE


def arena_at(found: FrameRange) -> Arena:
    """(num_frames, frame_bytes) uint8: a model's range as NumPy sees it. Touching what is not mapped is a fault."""
    memory = (ctypes.c_uint8 * found.num_bytes).from_address(found.base)
    return np.ctypeslib.as_array(memory).reshape(found.num_frames, found.frame_bytes)
