"""Copies between a GPU and pinned host memory, by its copy engines, on a stream of their own."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from crosspool.backends.cuda.device.driver import CudaError, Driver
from crosspool.backends.cuda.device.queues import own_stream

Addresses = npt.NDArray[np.uint64]

_IN_STREAM_ORDER = 1
_BESIDE_KERNELS = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


class CopyEngine(Protocol):
    """Copies in the background."""

    def enqueue(self, targets: Addresses, sources: Addresses, num_bytes: int) -> Callable[[], bool]:
        """Copy `num_bytes` from each source to its target, in any order, once all that was enqueued before has ended.

        Returns what tells whether that has happened; it never blocks.
        """
        ...


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: no hints about where operands lie, since both sides are known to the driver."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@dataclass
class DeviceCopyEngine:
    """Implements `CopyEngine` on one GPU, whose context is current: a call of the driver for all copies of a batch.

    The driver's library is called itself, since a batch is arrays of numbers here and would be lists of objects for
    cuda-bindings: a page of a long context is a dozen copies, and the thread that enqueues them runs decode steps too.
    """

    driver: Driver
    device: torch.device
    _library: Any = field(init=False)
    _stream: Any = field(init=False)

    def __post_init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._stream = own_stream(self.device)

    def enqueue(self, targets: Addresses, sources: Addresses, num_bytes: int) -> Callable[[], bool]:
        sizes = np.full(len(targets), num_bytes, dtype=np.uint64)
        self._enqueue(targets, sources, sizes)
        ended = torch.cuda.Event()
        ended.record(self._stream)
        query: Callable[[], bool] = ended.query
        return query

    def _enqueue(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        arrays = tuple(ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes))
        attributes = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_KERNELS)
        first = ctypes.c_size_t(0)
        batch = (*arrays, ctypes.c_size_t(len(targets)), ctypes.byref(attributes), ctypes.byref(first))
        one = ctypes.c_size_t(1)
        if hasattr(self._library, "cuMemcpyBatchAsync_v2"):
            self._check("cuMemcpyBatchAsync", self._library.cuMemcpyBatchAsync_v2(*batch, one, stream))
        elif hasattr(self._library, "cuMemcpyBatchAsync"):
            failed = ctypes.c_size_t()
            self._check(
                "cuMemcpyBatchAsync", self._library.cuMemcpyBatchAsync(*batch, one, ctypes.byref(failed), stream)
            )
        else:  # drivers before 12.8
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                copied = self._library.cuMemcpyAsync(
                    ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), stream
                )
                self._check("cuMemcpyAsync", copied)

    def _check(self, name: str, status: int) -> None:
        if status != 0:
            raise CudaError(f"{self.driver.rank}: {name} failed: error {status} of the CUDA driver")
