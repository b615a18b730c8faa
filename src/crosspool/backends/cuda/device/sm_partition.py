"""A stream whose kernels keep to a part of the device's multiprocessors, so that others always find some free.

Stream priorities alone do not keep decode quick beside a prompt: a kernel that has begun holds its multiprocessors to
its end, and a decode step is hundreds of kernels, each of which would wait for one.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from crosspool.backends.cuda.device.driver import CudaError, Driver
from crosspool.backends.cuda.device.queues import DECODE_STREAM_PRIORITY, own_stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SmPartition:
    """A green context of `num_sms` multiprocessors, over the device's primary context."""

    context: Any
    num_sms: int

    @classmethod
    def create(cls, driver: Driver, device: int, num_sms: int) -> "SmPartition | None":
        """At least `num_sms` multiprocessors, rounded up by the driver; None, logged, where it offers no partitions."""
        from cuda.bindings import driver as cuda

        try:
            handle = driver.device(device)
            whole = driver.call("cuDeviceGetDevResource", handle, cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
            status, groups, _count, _rest = cuda.cuDevSmResourceSplitByCount(1, whole, 0, num_sms)
            if status != cuda.CUresult.CUDA_SUCCESS:
                raise CudaError(f"{driver.rank}: cuDevSmResourceSplitByCount failed: {status.name}")
            description = driver.call("cuDevResourceGenerateDesc", [groups[0]], 1)
            flags = cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            context = driver.call("cuGreenCtxCreate", description, handle, flags)
        except (CudaError, AttributeError) as failure:
            logger.warning("%s: prompts share every multiprocessor with decode: %s", driver.rank, failure)
            return None
        return cls(context, int(groups[0].sm.smCount))

    def stream(self, driver: Driver, device: torch.device, priority: int) -> Any:
        """A new stream of the partition."""
        from cuda.bindings import driver as cuda

        flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = driver.call("cuGreenCtxStreamCreate", self.context, flags, priority)
        return torch.cuda.ExternalStream(int(handle), device)


class PrefillStreams:
    """Where one lane's chunks run: on the whole device, or on a part of it while others decode there.

    urgent: the part again, of decode's priority.
    """

    def __init__(self, driver: Driver, device: torch.device, partition: SmPartition | None) -> None:
        self._whole = own_stream(device)
        if partition is None:
            self._part, self._urgent = self._whole, own_stream(device, DECODE_STREAM_PRIORITY)
        else:
            self._part = partition.stream(driver, device, 0)
            self._urgent = partition.stream(driver, device, DECODE_STREAM_PRIORITY)
        self.current: Any = None
        """The one that was picked last."""
        self.is_shared = False
        """Whether the current stream is one of the partition."""

    @property
    def by_share(self) -> dict[bool, Any]:
        """The stream of the whole device, and that of the partition if there is one."""
        return {False: self._whole} if self._part is self._whole else {False: self._whole, True: self._part}

    @property
    def all(self) -> tuple[Any, ...]:
        """Every stream that chunks may run on."""
        return (*self.by_share.values(), self._urgent)

    def pick(self, is_shared: bool, is_urgent: bool = False) -> Any:
        """The stream for the next kernels, ordered behind those enqueued so far. is_urgent: where it is shared.

        NOTE: a partition's stream that waits for one of the whole device was seen held up by a kernel that spins on
        another stream of the whole device, so nothing waits for a stream that has ended.
        """
        stream = self._whole
        if is_shared:
            stream = self._urgent if is_urgent else self._part
        if stream is not self.current:
            if self.current is not None and not self.current.query():
                stream.wait_stream(self.current)
            self.current, self.is_shared = stream, self._whole not in (stream, self._part)
        return stream

    def synchronize(self) -> None:
        if self.current is not None:
            self.current.synchronize()
