"""Reads runs of bytes of files into shared memory as its parent asks for them, until the parent closes its pipe.

Run as a script by `readers.py`. It imports nothing of the package, so that it starts in hundredths of a second.
"""

import mmap
import os
import signal
import struct
import sys

COMMAND = struct.Struct("<IIQQQ")
"""(number of the command, bytes of the path behind it, first byte in the file, bytes, first byte in shared memory).

Without a path the bytes are zeros: their pages are there afterwards.
"""

DONE = struct.Struct("<I?")
"""(number of the command, whether the bytes are there)."""


def serve(memory_fd: int, commands_fd: int, done_fd: int) -> None:
    """memory_fd: of the shared memory. commands_fd: a pipe of COMMAND and path. done_fd: a pipe that takes DONE."""
    files: dict[bytes, int] = {}
    with mmap.mmap(memory_fd, 0) as memory, memoryview(memory) as view, open(commands_fd, "rb") as commands:
        while head := commands.read(COMMAND.size):
            number, path_bytes, first, count, at = COMMAND.unpack(head)
            path = commands.read(path_bytes)
            try:
                if not path:
                    memory[at : at + count : mmap.PAGESIZE] = bytes(-(-count // mmap.PAGESIZE))
                    os.write(done_fd, DONE.pack(number, True))
                    continue
                fd = files.get(path)
                if fd is None:
                    fd = files[path] = os.open(path, os.O_RDONLY)
                is_there = _fill(fd, view[at : at + count], first)
            except OSError:
                is_there = False  # the parent tries again itself, and raises what it meets
            os.write(done_fd, DONE.pack(number, is_there))


def _fill(fd: int, view: memoryview, first: int) -> bool:
    """Whether the file was long enough."""
    with view:
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], first + done)
            if count == 0:
                return False
            done += count
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent says when to end
    serve(*map(int, sys.argv[1:4]))
