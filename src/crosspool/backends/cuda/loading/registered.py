"""Files of the page cache as a GPU's copy engine reads them: their pages, pinned in regions ahead of need.

Nothing of them is copied on the host. Where the file system keeps large folios (XFS, ext4 from Linux 6.16 on), pages
are pinned nearly as fast as the bus moves them; 4 KiB pages, such as those of tmpfs, are not.
"""

import logging
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from crosspool.backends.cuda.device.launch import CudaError
from crosspool.weights_pool.extents import Extent

logger = logging.getLogger(__name__)

REGION_BYTES = 64 * 1024 * 1024
TRIED_REGIONS = 5
MIN_GB_PER_S = 28.0
"""Below this processes that read files into pinned buffers are quicker."""

MADV_POPULATE_READ = 22
"""Linux 5.14's, which the standard library does not name."""


@dataclass(frozen=True, slots=True)
class Pinning:
    """How pages are pinned for a device: (address, bytes) each. Both raise CudaError."""

    register: Callable[[int, int], None]
    unregister: Callable[[int], None]


@dataclass
class MappedFile:
    """A file's bytes in this process's addresses, and its regions that are pinned or will be."""

    memory: mmap.mmap
    address: int
    num_bytes: int
    regions: dict[int, Future[None]] = field(default_factory=dict)

    @classmethod
    def open(cls, file: Path) -> "MappedFile":
        with file.open("rb") as opened:
            memory = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        return cls(memory, int(np.frombuffer(memory, np.uint8).ctypes.data), len(memory))

    def bounds(self, region: int) -> tuple[int, int]:
        """Its bytes in the file, whole pages."""
        stop = min((region + 1) * REGION_BYTES, -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        return region * REGION_BYTES, stop


class RegisteredFiles:
    """Pins what extents need, in their order, in a thread of its own."""

    def __init__(self, pinning: Pinning, begin: Callable[[], None]) -> None:
        """begin: what the thread does first."""
        self._pinning = pinning
        self._files: dict[Path, MappedFile] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="crosspool-pages", initializer=begin)

    def expect(self, extents: Iterable[Extent]) -> None:
        """Have their regions pinned, after those expected before."""
        for extent in extents:
            file = self._mapped(extent.file)
            for region in range(extent.start // REGION_BYTES, (extent.stop - 1) // REGION_BYTES + 1):
                if region not in file.regions:
                    file.regions[region] = self._thread.submit(self._pin, file, region)

    def runs(self, file: Path, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of bytes [start, stop) of an expected extent, once they are pinned; cut where regions end.

        Raises CudaError where they could not be pinned.
        """
        mapped = self._files[file]
        while start < stop:
            region = start // REGION_BYTES
            mapped.regions[region].result()
            end = min(stop, (region + 1) * REGION_BYTES)
            yield mapped.address + start, end - start
            start = end

    def try_out(self, file: Path) -> float:
        """GB/s at which a file's first regions are pinned, the very first left out where there are more.

        Raises CudaError where they cannot be.
        """
        mapped = self._mapped(file)
        for region in range(min(TRIED_REGIONS, -(-mapped.num_bytes // REGION_BYTES))):
            mapped.regions[region] = self._thread.submit(self._pin, mapped, region)
        begin, last = time.perf_counter(), len(mapped.regions) - 1
        if last:
            mapped.regions[0].result()
            begin = time.perf_counter()
        mapped.regions[last].result()
        num_bytes = mapped.bounds(last)[1] - mapped.bounds(min(1, last))[0]
        return num_bytes / 1e9 / (time.perf_counter() - begin)

    def close(self) -> None:
        """Unpin all, behind what is being pinned; in a thread, for it takes half a second for 58 GB."""
        for mapped in self._files.values():
            for pinned in mapped.regions.values():
                pinned.cancel()
        for mapped in self._files.values():
            for region, pinned in mapped.regions.items():
                if not pinned.cancelled():
                    self._thread.submit(self._unpin, mapped, region, pinned)
        self._thread.shutdown(wait=False)

    def _mapped(self, file: Path) -> MappedFile:
        if file not in self._files:
            self._files[file] = MappedFile.open(file)
        return self._files[file]

    def _pin(self, file: MappedFile, region: int) -> None:
        start, stop = file.bounds(region)
        with suppress(OSError):  # an older kernel; pinning brings the pages itself, more slowly
            file.memory.madvise(MADV_POPULATE_READ, start, stop - start)
        self._pinning.register(file.address + start, stop - start)

    def _unpin(self, file: MappedFile, region: int, pinned: Future[None]) -> None:
        if pinned.exception() is not None:
            return
        try:
            self._pinning.unregister(file.address + file.bounds(region)[0])
        except CudaError as failure:
            logger.warning("pages of a checkpoint stay pinned until this process ends: %s", failure)


def device_pinning(device: torch.device) -> Pinning | None:
    """The driver's; None where the device cannot read pages that this process may not write."""
    from cuda.bindings import driver

    def call(name: str, *arguments: int) -> None:
        (status,) = getattr(driver, name)(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name} of a checkpoint's pages for {device} failed: {status.name}")

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    status, is_supported = driver.cuDeviceGetAttribute(attribute, device.index or 0)
    if status != driver.CUresult.CUDA_SUCCESS or not is_supported:
        return None
    read_only = int(driver.CU_MEMHOSTREGISTER_READ_ONLY)
    return Pinning(
        lambda address, num_bytes: call("cuMemHostRegister", address, num_bytes, read_only),
        lambda address: call("cuMemHostUnregister", address),
    )


def register_files(files: Iterable[Path], pinning: Pinning | None, begin: Callable[[], None]) -> RegisteredFiles | None:
    """For files that are in the page cache and pinned fast enough there; None, logged, where they are not.

    begin: of `RegisteredFiles`.
    """
    files = list(files)
    if pinning is None or not files:
        return None
    registered = RegisteredFiles(pinning, begin)
    try:
        gb_per_s = registered.try_out(files[0])
    except (CudaError, OSError) as failure:
        logger.info("weights are read by processes: %s", failure)
        registered.close()
        return None
    if gb_per_s < MIN_GB_PER_S:
        logger.info("weights are read by processes: pages of %s are pinned at %.1f GB/s only", files[0], gb_per_s)
        registered.close()
        return None
    return registered
