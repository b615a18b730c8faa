"""Host memory of gigabytes, pinned for one GPU's copies."""

import logging
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from crosspool.backends.cuda.driver import Driver
from crosspool.backends.cuda.peer_memory import RegisteredMemory

logger = logging.getLogger(__name__)

NUM_THREADS = 8
"""That make memory come into being; zeroing it is most of what pinning takes."""


def pinned_memory(driver: Driver, num_bytes: int) -> RegisteredMemory:
    """Zeroed memory of this process. Raises OSError or CudaError where there is not so much."""
    return RegisteredMemory(driver, memoryview(touched_memory(num_bytes)))


def touched_memory(num_bytes: int) -> mmap.mmap:
    """In large pages where the system has them, and all of it there: pinning would wait for one page after another."""
    region = mmap.mmap(-1, num_bytes)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as failure:
        logger.info("%d bytes of host memory lie in small pages: %s", num_bytes, failure)
    parts = np.array_split(np.frombuffer(region, np.uint8)[:: mmap.PAGESIZE], NUM_THREADS)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(lambda part: part.fill(0), parts))
    return region
