"""Memory that the two ends of a channel share: an array within a process, an anonymous memory file between two.

A memory file has no name, so nothing of it can be left behind: it lives as long as somebody has it open or mapped,
whichever way that process ends.
"""

import mmap
import os
import tempfile
from typing import Protocol

import numpy as np

from crosspool.units import align_up

LINE_BYTES = 128
"""Two 64-byte cache lines: prefetchers fetch pairs, so words that different ranks write lie this far apart."""


class Region(Protocol):
    """Zeroed memory that several ranks map, beginning at a multiple of LINE_BYTES."""

    @property
    def num_bytes(self) -> int: ...

    def map(self) -> memoryview:
        """The region's bytes, writable; they stay valid while the view, or a view of it, is alive."""
        ...

    def close(self) -> None:
        """Let go of the handle; what is mapped stays valid."""
        ...


class ArrayRegion:
    """A region within one process."""

    def __init__(self, num_bytes: int) -> None:
        padded = np.zeros(num_bytes + LINE_BYTES, np.uint8)
        start = align_up(padded.ctypes.data, LINE_BYTES) - padded.ctypes.data
        self._bytes = padded[start : start + num_bytes]

    @property
    def num_bytes(self) -> int:
        return self._bytes.size

    def map(self) -> memoryview:
        return self._bytes.data

    def close(self) -> None:
        """Nothing to let go of."""


class FileRegion:
    """A region between processes. Whoever holds the object owns its descriptor; `control.py` sends it along."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self._num_bytes = num_bytes

    @classmethod
    def create(cls, num_bytes: int) -> "FileRegion":
        """A new region of zeros."""
        fd = _anonymous_file()
        os.ftruncate(fd, num_bytes)
        return cls(fd, num_bytes)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def map(self) -> memoryview:
        return memoryview(mmap.mmap(self.fd, self._num_bytes))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> tuple[type["FileRegion"], tuple[int, int]]:
        """Pickles without its descriptor, which crosses beside the message (`control.py`)."""
        return FileRegion, (-1, self._num_bytes)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("crosspool", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # already unlinked
        return os.dup(file.fileno())
