"""Processes that read extents side by side into memory shared with a loader.

One core moves 4 to 6 GB/s out of the page cache, the bus of a GPU 55 GB/s. Threads of one interpreter cannot feed it:
with 3 MiB a read they spend their time on its lock (17 GB/s with a dozen on an H200's host, where reads alone come to
60). So the readers are processes, and the loader one thread that tells them what to read.
"""

import mmap
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from crosspool.errors import CrossPoolError
from crosspool.weights_pool import reader_process
from crosspool.weights_pool.extents import Extent
from crosspool.weights_pool.reader_process import COMMAND, DONE

BUFFERS_EACH = 2
"""Pieces of memory of each reader: one is read into while the other is copied from."""


class Readers:
    """`num_readers` processes, each with BUFFERS_EACH buffers. A context manager: they end with the block.

    memory: all buffers, shared with them; buffer n begins at byte n * buffer_bytes. It goes with its last user.
    """

    def __init__(self, num_readers: int, buffer_bytes: int) -> None:
        self.num_buffers, self.buffer_bytes = num_readers * BUFFERS_EACH, buffer_bytes
        fd = os.memfd_create("crosspool-readers")
        try:
            os.ftruncate(fd, self.num_buffers * buffer_bytes)
            self.memory = mmap.mmap(fd, 0)
            self._done, done = os.pipe()
            self._commands: list[int] = []
            self._processes: list[subprocess.Popen[bytes]] = []
            try:
                for _ in range(num_readers):
                    self._start(fd, done)
            except BaseException:
                self.close()
                raise
            finally:
                os.close(done)
        finally:
            os.close(fd)
        self._poll = select.poll()
        self._poll.register(self._done, select.POLLIN)

    def _start(self, memory_fd: int, done: int) -> None:
        commands, end = os.pipe()
        try:
            fds = (memory_fd, commands, done)
            words = [sys.executable, "-I", "-S", str(Path(reader_process.__file__)), *map(str, fds)]
            self._processes.append(subprocess.Popen(words, pass_fds=fds, stdin=subprocess.DEVNULL))
            self._commands.append(end)
        finally:
            os.close(commands)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def read(self, extent: Extent, buffer: int) -> None:
        """Have the extent, which fits, read into a buffer. Its reader is that buffer's, and takes one after another.

        Raises CrossPoolError where that is gone.
        """
        self._ask(buffer, os.fsencode(extent.file), extent.start, extent.num_bytes)

    def touch(self) -> None:
        """Returns once the pages of all buffers, which nobody uses yet, are there: each reader makes its own.

        One thread that pins them makes 2 GB/s of pages, and 30 of those that it finds. Raises CrossPoolError where a
        reader is gone.
        """
        left = set(range(self.num_buffers))
        for buffer in left:
            self._ask(buffer, b"", 0, self.buffer_bytes)
        while left:
            left -= {buffer for buffer, _ in self.ended(wait=True)}

    def _ask(self, buffer: int, path: bytes, start: int, num_bytes: int) -> None:
        reader = buffer // BUFFERS_EACH
        head = COMMAND.pack(buffer, len(path), start, num_bytes, buffer * self.buffer_bytes)
        try:
            os.write(self._commands[reader], head + path)
        except BrokenPipeError:
            raise _gone(self._processes[reader].wait()) from None

    def ended(self, *, wait: bool) -> Iterator[tuple[int, bool]]:
        """(buffer, whether its bytes are there) of reads that have ended; at least one where it waits.

        Raises CrossPoolError for a reader that is gone.
        """
        while not self._poll.poll(1000 if wait else 0):
            if not wait:
                return
            for process in self._processes:
                if (code := process.poll()) is not None:
                    raise _gone(code)
        data = os.read(self._done, 512 * DONE.size)
        if not data:
            raise CrossPoolError("all processes that read weights have ended; load again")
        yield from DONE.iter_unpack(data)

    def __enter__(self) -> "Readers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Every reader ends once it has read what it was asked for."""
        for commands in self._commands:
            os.close(commands)
        for process in self._processes:
            process.wait()
        os.close(self._done)


def _gone(code: int) -> CrossPoolError:
    """Of a reader that has ended with this code."""
    return CrossPoolError(f"a process that reads weights ended with {code}; load again")
