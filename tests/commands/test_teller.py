"""What a start says goes to its console as long as that takes anything."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest
from rich.console import Console

from crosspool.commands.loading import Notices, teller


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


def test_a_reader_that_has_gone_ends_nothing_and_leaves_standard_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with os.fdopen(writable, "wb", buffering=0) as raw, io.TextIOWrapper(raw, write_through=True) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        tell = teller(Notices())
        tell("loaded")
        tell("serving")
        monkeypatch.undo()
    os.write(1, b"still here")
    assert capfd.readouterr().out == "still here"
