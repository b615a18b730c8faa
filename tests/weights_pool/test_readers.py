"""Readers put the bytes of files where they are asked to, and tell what they could not read."""

from __future__ import annotations

import mmap
import os
import signal

import numpy as np
import pytest

from crosspool.errors import CrossPoolError
from crosspool.weights_pool.extents import Extent
from crosspool.weights_pool.readers import BUFFERS_EACH, Readers

BUFFER = 4096


def ended(readers, count):
    found = []
    while len(found) < count:
        found += readers.ended(wait=True)
    return dict(found)


def test_every_buffer_holds_the_bytes_that_it_was_asked_for(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes()
    files = [tmp_path / name for name in ("one", "zwei \u00e4")]
    for file in files:
        file.write_bytes(data)
    with Readers(2, BUFFER) as readers:
        assert readers.num_buffers == 2 * BUFFERS_EACH
        for turn in range(5):
            wanted = [
                Extent(files[buffer % 2], start := 977 * (buffer + turn), start + BUFFER - buffer, (), 0)
                for buffer in range(readers.num_buffers)
            ]
            for buffer, extent in enumerate(wanted):
                readers.read(extent, buffer)
            assert ended(readers, len(wanted)) == dict.fromkeys(range(len(wanted)), True)
            for buffer, extent in enumerate(wanted):
                begin = buffer * BUFFER
                assert readers.memory[begin : begin + extent.num_bytes] == data[extent.start : extent.stop]


def test_touched_buffers_have_pages_before_anything_is_read(tmp_path, monkeypatch):
    create, memory = os.memfd_create, []

    def kept(name):
        memory.append(os.dup(fd := create(name)))
        return fd

    monkeypatch.setattr(os, "memfd_create", kept)
    with Readers(2, 3 * mmap.PAGESIZE) as readers:
        assert os.fstat(memory[0]).st_blocks == 0
        readers.touch()
        whole = os.fstat(memory[0])
        assert whole.st_blocks * 512 == whole.st_size == 2 * BUFFERS_EACH * 3 * mmap.PAGESIZE
        (tmp_path / "file").write_bytes(b"xyz")
        readers.read(Extent(tmp_path / "file", 0, 3, (), 0), 3)
        assert ended(readers, 1) == {3: True}
    os.close(memory[0])


def test_a_file_that_is_short_or_gone_is_told_and_the_reader_goes_on(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 10)
    with Readers(1, BUFFER) as readers:
        readers.read(Extent(tmp_path / "short", 5, 11, (), 0), 0)
        readers.read(Extent(tmp_path / "gone", 0, 1, (), 0), 1)
        assert ended(readers, 2) == {0: False, 1: False}
        readers.read(Extent(tmp_path / "short", 5, 10, (), 0), 0)
        assert ended(readers, 1) == {0: True}


@pytest.mark.parametrize("num_readers", [1, 2])
def test_a_reader_that_was_killed_is_an_error(num_readers):
    with Readers(num_readers, BUFFER) as readers:
        os.kill(readers.pids[0], signal.SIGKILL)
        with pytest.raises(CrossPoolError, match=r"ended"):
            list(readers.ended(wait=True))


def test_a_reader_that_is_gone_is_told_also_to_who_asks_it_to_read(tmp_path):
    """A process of two may go while the other has more to read: nobody waits for it yet."""
    with Readers(1, BUFFER) as readers:
        (pid,) = readers.pids
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(CrossPoolError, match=r"a process that reads weights ended with -9; load again"):
            readers.read(Extent(tmp_path / "any", 0, 1, (), 0), 0)
