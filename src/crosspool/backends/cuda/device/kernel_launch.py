"""Launches of kernels by the driver's library itself: cuda-bindings makes objects of every launch's configuration."""

import ctypes
from functools import cache
from typing import Any

from crosspool.backends.cuda.device.driver import CudaError


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a number for its value."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


COOPERATIVE = ctypes.pointer(_Attribute(id=2, value=1))
OVERLAPPING = ctypes.pointer(_Attribute(id=6, value=1))
"""Programmatic stream serialization: the kernel may start while the one before it still runs."""


@cache
def _launch() -> Any:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return launch


def launch_kernel(
    function: int,
    grid: tuple[int, int, int],
    threads: int,
    smem_bytes: int,
    stream: int,
    params: Any,
    attribute: "ctypes._Pointer[_Attribute] | None" = None,
    *,
    what: str,
) -> None:
    """Enqueue a function on a stream, both by the driver's handles. Raises CudaError, which names `what`.

    params: an array of pointers to its parameters, which are copied before the call returns.
    """
    config = _Config(*grid, threads, 1, 1, smem_bytes, stream, attribute, attribute is not None)
    status = _launch()(config, function, params, None)
    if status:
        from cuda.bindings import driver

        raise CudaError(f"cuLaunchKernelEx of {what} failed: {driver.CUresult(status).name}")
