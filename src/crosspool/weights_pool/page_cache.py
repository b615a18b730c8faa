"""Whether files lie in the page cache, by looking at some of their bytes."""

import os
from collections.abc import Iterable
from pathlib import Path

LOOK_EVERY = 16 * 1024 * 1024
"""Bytes between two looks: 58 GB take 3,500 of them, some milliseconds."""


def are_cached(files: Iterable[Path], look_every: int = LOOK_EVERY) -> bool:
    """Whether every byte looked at could be read at once; not so on file systems that cannot say.

    Raises OSError for a file that cannot be opened.
    """
    no_wait = getattr(os, "RWF_NOWAIT", None)  # Linux alone
    return no_wait is not None and all(_is_cached(file, look_every, no_wait) for file in files)


def _is_cached(file: Path, look_every: int, no_wait: int) -> bool:
    byte = bytearray(1)
    fd = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        places = (*range(0, size, look_every), max(0, size - 1))
        return all(os.preadv(fd, [byte], place, no_wait) == min(1, size) for place in places)
    except OSError:  # EAGAIN: it would have to be read; EOPNOTSUPP: the file system cannot say
        return False
    finally:
        os.close(fd)
