"""What a start says goes to its console as long as that takes anything."""

from __future__ import annotations

import errno
import io
import os

from rich.console import Console

from crosspool.commands.loading import teller


class FullDisk(io.StringIO):
    """A file on a disk that has no room left."""

    asked = 0

    def write(self, text: str) -> int:
        self.asked += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_console_whose_disk_is_full_ends_nothing() -> None:
    full = FullDisk()
    tell = teller(Console(file=full))
    tell("loaded")
    tell("serving")
    assert full.asked >= 2
