"""Extents: a share's reads as few long runs of bytes of its files, for a loader that many threads feed.

A checkpoint has thousands of small matrices that lie side by side in its files; one call reads several of them. Most
also lie in one piece where they go, so that their bytes are copied as they are.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path

from crosspool.errors import CheckpointError
from crosspool.weights_pool.checkpoint import ITEM_BYTES, Checkpoint
from crosspool.weights_pool.loader import Read
from crosspool.weights_pool.regions import Index

EXTENT_BYTES = 4 * 1024 * 1024
GAP_BYTES = 256 * 1024
"""Bytes between two reads that are read along with them."""


@dataclass(frozen=True, slots=True)
class Part:
    """One read within a file: bytes `start` to `stop`, elements of `shape` in which each axis advances `strides`.

    at: where its elements go side by side, in elements from the destination's first; None: they must be arranged.
    """

    file: Path
    read: Read
    dtype: str  # as stored
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    at: int | None


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `start` to `stop` of a file, and what is taken from them."""

    file: Path
    start: int
    stop: int
    parts: tuple[Part, ...]
    payload_bytes: int  # of the destinations, in the stored dtypes

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def extents(parts: Iterable[Part], max_bytes: int = EXTENT_BYTES) -> list[Extent]:
    """All parts, in the order of files and bytes. Only an extent of one part may be longer than `max_bytes`."""
    by_file: dict[Path, list[Part]] = {}
    for part in parts:
        by_file.setdefault(part.file, []).append(part)
    found: list[Extent] = []
    for file, located in by_file.items():
        located.sort(key=attrgetter("start", "stop"))
        start, stop, members = located[0].start, located[0].stop, [located[0]]
        for part in located[1:]:
            if part.start - stop <= GAP_BYTES and max(stop, part.stop) - start <= max_bytes:
                stop = max(stop, part.stop)
                members.append(part)
                continue
            found.append(_extent(file, start, stop, members))
            start, stop, members = part.start, part.stop, [part]
        found.append(_extent(file, start, stop, members))
    return found


def _extent(file: Path, start: int, stop: int, parts: list[Part]) -> Extent:
    return Extent(file, start, stop, tuple(parts), sum([part.read.num_bytes for part in parts]))


def part_of(checkpoint: Checkpoint, read: Read) -> Part:
    """Where a read's region lies in its file, and whether it goes to its destination as it is."""
    stored, region = checkpoint.tensors[read.source], read.region
    item_bytes = ITEM_BYTES[stored.dtype]
    first, last, elements, shape = bounds(stored.shape, region.read)
    at = None
    if last + 1 - first == elements and not region.pick and not region.transpose:
        begin, end, count, _ = bounds(read.destination.shape, region.index)
        at = begin if end + 1 - begin == count else None
    start, stop = stored.begin + first * item_bytes, stored.begin + (last + 1) * item_bytes
    return Part(stored.file, read, stored.dtype, start, stop, shape, strides_of(stored.shape), at)


def bounds(shape: tuple[int, ...], index: Index) -> tuple[int, int, int, tuple[int, ...]]:
    """(first element, last element, number of elements, shape) of a region of an array in C order."""
    first, last, elements, lengths = 0, 0, 1, []
    for axis, extent, stride in zip(index, shape, strides_of(shape), strict=True):
        start, stop, _ = axis.indices(extent)
        first += start * stride
        last += (stop - 1) * stride
        elements *= stop - start
        lengths.append(stop - start)
    return first, last, elements, tuple(lengths)


@lru_cache(maxsize=4096)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements that each axis advances."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))


def joined(extent: Extent, is_plain: Callable[[Part], bool]) -> Extent:
    """The same with neighbours, in the file and in one destination, as one part; `read` is then the first one's.

    is_plain: whether a part is copied as it is; others stay alone.
    """
    if len(extent.parts) == 1:
        return extent
    found: list[Part] = []
    is_open = False
    for part in extent.parts:
        can_join = part.at is not None and is_plain(part)
        if is_open and can_join and _follows(found[-1], part):
            found[-1] = replace(found[-1], stop=part.stop)
        else:
            found.append(part)
        is_open = can_join
    return replace(extent, parts=tuple(found))


def _follows(last: Part, part: Part) -> bool:
    if last.read.destination is not part.read.destination or last.stop != part.start or last.at is None:
        return False
    return last.at + (last.stop - last.start) // ITEM_BYTES[last.dtype] == part.at


def shortened(extent: Extent, is_plain: Callable[[Part], bool], max_bytes: int) -> Iterator[Extent]:
    """The same as extents of at most `max_bytes`, if it is longer and one part that is copied as it is.

    Shape and strides of its parts are then still those of the whole.
    """
    part = extent.parts[0]
    if extent.num_bytes <= max_bytes or len(extent.parts) > 1 or part.at is None or not is_plain(part):
        yield extent
        return
    item_bytes = ITEM_BYTES[part.dtype]
    step = max(1, max_bytes // item_bytes) * item_bytes
    for start in range(part.start, part.stop, step):
        stop = min(start + step, part.stop)
        piece = replace(part, start=start, stop=stop, at=part.at + (start - part.start) // item_bytes)
        yield Extent(extent.file, start, stop, (piece,), stop - start)


class ExtentReader:
    """Reads extents into memory of the caller, one thread at a time. A context manager: it keeps files open."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}

    def read(self, extent: Extent, into: memoryview) -> None:
        """Fill the first bytes of `into`, without the interpreter's lock.

        Raises CheckpointError for a file that has become shorter.
        """
        fd = self._fds.get(extent.file)
        if fd is None:
            fd = self._fds[extent.file] = os.open(extent.file, os.O_RDONLY)
        done = 0
        while done < extent.num_bytes:
            count = os.preadv(fd, [into[done : extent.num_bytes]], extent.start + done)
            if count == 0:
                raise CheckpointError(f"{extent.file}: ends at byte {extent.start + done}; was it changed meanwhile?")
            done += count

    def __enter__(self) -> "ExtentReader":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
