"""VmmDriver: the calls of CUDA's virtual memory management that a backing needs, as cuda-bindings has them.

Each returns a tuple whose first element is a status, 0 where the call went well, and then what it gives.
`backends/cuda` has the real one; `backends/numpy/host_vmm.py` does the same with host memory; tests have one that fails
when told to.
"""

from typing import Any, Protocol

from crosspool.errors import CrossPoolError


class DriverError(CrossPoolError):
    """A driver call failed; the message names the call and its status."""


class NoMemoryError(DriverError):
    """The same, for want of memory."""


NO_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class VmmDriver(Protocol):
    """Addresses, sizes and handles are integers or what the driver itself gave. Sizes are multiples of a frame."""

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> tuple[Any, ...]:
        """(status, address): a range of addresses without memory."""
        ...

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[Any, ...]: ...

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:
        """(status, handle): physical memory without an address."""
        ...

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]: ...

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: Any, flags: int) -> tuple[Any, ...]: ...

    def cuMemSetAccess(self, ptr: int, size: int, desc: Any, count: int) -> tuple[Any, ...]: ...

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]: ...

    def allocation_properties(self) -> Any:
        """`prop` of cuMemCreate: which device's memory."""
        ...

    def access_descriptors(self) -> list[Any]:
        """`desc` of cuMemSetAccess: who may read and write."""
        ...


def call(driver: VmmDriver, name: str, *arguments: Any) -> Any:
    """The result of a call, or None where it has none. Raises DriverError naming call and status."""
    status, *results = getattr(driver, name)(*arguments)
    if int(status) != 0:
        kind = NoMemoryError if int(status) == NO_MEMORY else DriverError
        raise kind(f"{name} failed: {getattr(status, 'name', status)}")
    return results[0] if results else None
