"""CudaVmmDriver: CUDA's virtual memory calls as `kv_pool/backing` makes them, on one device."""

import ctypes
from typing import Any

import torch

from crosspool.backends.cuda.device.device_bytes import device_bytes
from crosspool.kv_pool.backing.base import FrameRange
from crosspool.units import MiB

GRANULARITY = 2 * MiB
"""What sizes of physical memory are multiples of, on every GPU that these kernels run on."""


class CudaVmmDriver:
    """Implements `kv_pool.backing.driver.VmmDriver` by cuda-bindings. A context of the device must exist.

    Frames are whole multiples of the device's granularity, 2 MiB. Handles are cuda-bindings' own objects.
    """

    def __init__(self, device: int) -> None:
        from cuda.bindings import driver  # only where the CUDA backend runs

        self._cuda: Any = driver
        self._location = driver.CUmemLocation()
        self._location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = device

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> tuple[Any, ...]:
        status, address = self._cuda.cuMemAddressReserve(size, alignment, addr, flags)
        return (status, int(address))

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[Any, ...]:
        return tuple(self._cuda.cuMemAddressFree(ptr, size))

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:
        return tuple(self._cuda.cuMemCreate(size, prop, flags))

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        return tuple(self._cuda.cuMemRelease(handle))

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: Any, flags: int) -> tuple[Any, ...]:
        return tuple(self._cuda.cuMemMap(ptr, size, offset, handle, flags))

    def cuMemSetAccess(self, ptr: int, size: int, desc: Any, count: int) -> tuple[Any, ...]:
        return tuple(self._cuda.cuMemSetAccess(ptr, size, desc, count))

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:
        return tuple(self._cuda.cuMemUnmap(ptr, size))

    def allocation_properties(self) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location
        return properties

    def access_descriptors(self) -> list[Any]:
        access = self._cuda.CUmemAccessDesc()
        access.location = self._location
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return [access]


def range_memory(found: FrameRange, device: torch.device) -> torch.Tensor:
    """(num_frames, frame_bytes) uint8: a range as memory of its device, which may be the host.

    Most of it is not mapped at any time; touching that is a fault of the device.
    """
    shape = (found.num_frames, found.frame_bytes)
    if device.type != "cuda":
        view = (ctypes.c_uint8 * found.num_bytes).from_address(found.base)
        return torch.frombuffer(view, dtype=torch.uint8).view(shape)
    memory = device_bytes(found.base, shape, device)
    assert memory.data_ptr() == found.base, "the range was copied"
    return memory
