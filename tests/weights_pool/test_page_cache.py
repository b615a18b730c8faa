"""Files in the page cache are told from files that would have to be read."""

from __future__ import annotations

import errno
import os

import pytest

from crosspool.weights_pool import page_cache
from crosspool.weights_pool.page_cache import are_cached

pytestmark = pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="Linux can say what is in the page cache")


def test_every_place_is_looked_at_and_the_last_byte(tmp_path, monkeypatch):
    file, looked = tmp_path / "file", []
    file.write_bytes(bytes(100))

    def look(fd, buffers, place, flags):
        looked.append(place)
        assert flags == os.RWF_NOWAIT
        return 1

    monkeypatch.setattr(page_cache.os, "preadv", look)
    assert are_cached([file], 30)
    assert looked == [0, 30, 60, 90, 99]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_one_place_that_is_not_there_is_enough(tmp_path, monkeypatch, number):
    files = [tmp_path / "one", tmp_path / "two"]
    for file in files:
        file.write_bytes(bytes(100))

    def look(fd, buffers, place, flags):
        if place == 90:
            raise OSError(number, "not now")
        return 1

    monkeypatch.setattr(page_cache.os, "preadv", look)
    assert are_cached(files, 40)
    assert not are_cached(files, 30)


def test_a_file_that_was_just_written_is_cached_or_its_file_system_cannot_say(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(100_000))
    with file.open("rb") as opened:
        try:
            is_there = os.preadv(opened.fileno(), [bytearray(1)], 99_999, os.RWF_NOWAIT) == 1
        except OSError:
            is_there = False
    assert are_cached([file]) == is_there
    with pytest.raises(FileNotFoundError):
        are_cached([tmp_path / "none"])
