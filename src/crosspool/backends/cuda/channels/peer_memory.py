"""Channel memory that a peer's GPU writes: allocated by its consumer, mapped by its one producer.

Between processes it is physical memory of its own (`cuMemCreate`), exported as a file descriptor and mapped by the
peer; it lives until the last of the two lets go, so a put to a rank that has died lands nowhere and harms nobody.
Within a process plain allocations and peer access do. Where peer access is missing, channels lie in host memory that
both GPUs have registered: the same kernels, only slower.
"""

from typing import Any, Protocol

import numpy as np
import torch

from crosspool.backends.cuda.device.driver import CudaError, Driver
from crosspool.backends.cuda.device.queues import stream_for
from crosspool.units import align_up


class Memory(Protocol):
    """Zeroed bytes at `base`, an address valid on this rank's device."""

    @property
    def base(self) -> int: ...

    def close(self) -> None: ...


class PlainMemory:
    """A plain allocation of this process."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._tensor = torch.zeros(num_bytes + 128, dtype=torch.uint8, device=device)
        self.base = align_up(self._tensor.data_ptr(), 128)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Freed with this object."""


class ExportedMemory:
    """Physical memory on `device` with a descriptor for the peer; `fd` belongs to this object."""

    def __init__(self, driver: Driver, num_bytes: int, device: int) -> None:
        from cuda.bindings import driver as cuda

        self._driver = driver
        properties = _properties(device)
        granularity = driver.call(
            "cuMemGetAllocationGranularity",
            properties,
            cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        )
        self.num_bytes = align_up(num_bytes, granularity)
        self._handle = driver.call("cuMemCreate", self.num_bytes, properties, 0)
        self._mapping = Mapping(driver, self._handle, self.num_bytes, device)
        self.base = self._mapping.base
        stream = stream_for("zeros", torch.device("cuda", device))  # the default one may wait for other lanes' graphs
        driver.call("cuMemsetD8Async", self.base, 0, self.num_bytes, stream.cuda_stream)
        stream.synchronize()
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.fd = int(driver.call("cuMemExportToShareableHandle", self._handle, kind, 0))

    def close(self) -> None:
        """Unmap here; the peer's mapping stays valid. The caller closes `fd`."""
        self._mapping.close()
        self._driver.call("cuMemRelease", self._handle)


class ImportedMemory:
    """A peer's exported memory, mapped for this rank's device."""

    def __init__(self, driver: Driver, fd: int, num_bytes: int, device: int) -> None:
        from cuda.bindings import driver as cuda

        self._driver = driver
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._handle = driver.call("cuMemImportFromShareableHandle", fd, kind)
        self._mapping = Mapping(driver, self._handle, num_bytes, device)
        self.base = self._mapping.base

    def close(self) -> None:
        self._mapping.close()
        self._driver.call("cuMemRelease", self._handle)


class Mapping:
    """An address range of this process for physical memory, accessible to one device."""

    def __init__(self, driver: Driver, handle: Any, num_bytes: int, device: int) -> None:
        from cuda.bindings import driver as cuda

        self._driver, self._num_bytes = driver, num_bytes
        self.base = int(driver.call("cuMemAddressReserve", num_bytes, 0, 0, 0))
        driver.call("cuMemMap", self.base, num_bytes, 0, handle, 0)
        access = cuda.CUmemAccessDesc()
        access.location = _properties(device).location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        driver.call("cuMemSetAccess", self.base, num_bytes, [access], 1)

    def close(self) -> None:
        self._driver.call("cuMemUnmap", self.base, self._num_bytes)
        self._driver.call("cuMemAddressFree", self.base, self._num_bytes)


class RegisteredMemory:
    """A host region that both ranks map, pinned for this rank's device."""

    def __init__(self, driver: Driver, region: memoryview) -> None:
        from cuda.bindings import driver as cuda

        self._driver = driver
        self._bytes = np.frombuffer(region, np.uint8)  # keeps the region mapped
        host = self._bytes.ctypes.data
        flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        (status,) = cuda.cuMemHostRegister(host, self._bytes.nbytes, flags)
        # A peer in the same process may have registered it already, for all devices.
        self._is_owner = status != cuda.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        if self._is_owner and status != cuda.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{driver.rank}: cuMemHostRegister of {self._bytes.nbytes} bytes failed: {status.name}")
        self.base = int(driver.call("cuMemHostGetDevicePointer", host, 0))

    def close(self) -> None:
        if self._is_owner:
            self._driver.call("cuMemHostUnregister", self._bytes.ctypes.data)


def _properties(device: int) -> Any:
    from cuda.bindings import driver as cuda

    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties
