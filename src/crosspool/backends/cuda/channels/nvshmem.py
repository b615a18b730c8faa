"""NVSHMEM's host library, as far as channels need it: meet, allocate together, find a peer's copy of an address.

Only the host library is used (`libnvshmem_host.so.3`, of the package nvidia-nvshmem-cu13 that CUDA builds of torch
bring along); nothing is compiled or linked against it. Signatures and structures: NVSHMEM 3, `nvshmemx_api.h`.
"""

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

LIBRARY = "libnvshmem_host.so.3"
ID_BYTES = 128
_WITH_ID = 1 << 3
_VERSION = 1 << 16  # of a structure: this, and its size

VARIABLES: Mapping[str, str] = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",  # peers are reached by loads and stores
    "NVSHMEM_DISABLE_NVLS": "1",  # no multicast
    "NVSHMEM_DISABLE_NCCL": "1",
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",  # no thread that spins
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",  # all ranks are on this machine
}
"""Where the environment does not say otherwise."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("internal", ctypes.c_char * (ID_BYTES - 4))]


class _IdArguments(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("id", ctypes.c_void_p), ("rank", ctypes.c_int), ("count", ctypes.c_int)]


class _Arguments(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("of_id", _IdArguments), ("content", ctypes.c_char * 96)]


class _Attributes(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("mpi_comm", ctypes.c_void_p), ("arguments", _Arguments)]


class Nvshmem(Protocol):
    """The calls. Ranks are numbered from 0; a process is one rank, on its current GPU."""

    def unique_id(self) -> bytes:
        """What the ranks of one team meet by; made by one of them, which must be in the team."""
        ...

    def join(self, rank: int, count: int, unique_id: bytes) -> None:
        """Become `rank` of `count`. Returns once all have come; a team is joined once in a process's life."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """Address here of zeroed memory that every rank allocates now, in the same order and size."""
        ...

    def address_at(self, address: int, rank: int) -> int:
        """Where kernels here reach the other rank's memory of this address; 0: they do not."""
        ...


class NvshmemLibrary:
    """The real one. Raises ValueError where it is not installed, or its calls fail."""

    def __init__(self, heap_bytes: int, path: Path | None = None) -> None:
        """heap_bytes: the most that this process will allocate. path: of the library; None: where it is installed."""
        for name, value in {**VARIABLES, "NVSHMEM_SYMMETRIC_SIZE": str(heap_bytes)}.items():
            os.environ.setdefault(name, value)
        path = path or find_library()
        try:
            self._calls = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as failure:
            raise ValueError(
                f"transport is nvshmem, but {path} cannot be loaded: {failure}; install nvidia-nvshmem-cu13, or use "
                "transport peer"
            ) from None
        self._calls.nvshmem_calloc.restype = ctypes.c_void_p
        self._calls.nvshmem_calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self._calls.nvshmem_ptr.restype = ctypes.c_void_p
        self._calls.nvshmem_ptr.argtypes = [ctypes.c_void_p, ctypes.c_int]

    def unique_id(self) -> bytes:
        unique = _UniqueId(version=_VERSION + ctypes.sizeof(_UniqueId))
        self._check("nvshmemx_get_uniqueid", ctypes.byref(unique))
        return bytes(unique)

    def join(self, rank: int, count: int, unique_id: bytes) -> None:
        unique = _UniqueId.from_buffer_copy(unique_id)
        attributes = _Attributes(version=_VERSION + ctypes.sizeof(_Attributes))
        attributes.arguments.version = _VERSION + ctypes.sizeof(_Arguments)
        attributes.arguments.of_id.version = _VERSION + ctypes.sizeof(_IdArguments)
        self._check("nvshmemx_set_attr_uniqueid_args", rank, count, ctypes.byref(unique), ctypes.byref(attributes))
        self._check("nvshmemx_hostlib_init_attr", ctypes.c_uint(_WITH_ID), ctypes.byref(attributes))

    def allocate(self, num_bytes: int) -> int:
        address = self._calls.nvshmem_calloc(num_bytes, 1)
        if not address:
            raise ValueError(f"nvshmem_calloc of {num_bytes} bytes failed; see NVSHMEM's messages (NVSHMEM_DEBUG=INFO)")
        return int(address)

    def address_at(self, address: int, rank: int) -> int:
        return int(self._calls.nvshmem_ptr(address, rank) or 0)

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._calls, name)(*arguments)
        if status:
            raise ValueError(f"{name} failed with {status}; see NVSHMEM's messages (NVSHMEM_DEBUG=INFO)")


def find_library() -> Path:
    """Where Python's packages have it; else its name, for the system's loader."""
    for package in ("nvidia.nvshmem", "nvidia"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            parts = ("lib",) if package.endswith("nvshmem") else ("nvshmem", "lib")
            path = Path(place).joinpath(*parts, LIBRARY)
            if path.exists():
                return path
    return Path(LIBRARY)
