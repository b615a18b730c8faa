"""As many open files as are allowed, and few lines where they do not suffice."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource

import pytest

from crosspool.server.open_files import LINE_EVERY_S, ShortageLines, raise_limit


def test_the_limit_becomes_what_the_administrator_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append((which, limits)))
    raise_limit()
    assert asked == [(resource.RLIMIT_NOFILE, (4096, 4096))]


def test_a_limit_that_stays_keeps_nothing_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_limit()


def trouble(number: int) -> dict[str, object]:
    """What asyncio says where `accept` fails."""
    return {"message": "socket.accept() out of system resource", "exception": OSError(number, os.strerror(number))}


async def test_connections_that_cannot_be_taken_are_told_now_and_then_without_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("crosspool.server.open_files.time.monotonic", lambda: now_s)
    handler, loop = ShortageLines(), asyncio.get_running_loop()
    for _ in range(2048):
        handler(loop, trouble(errno.EMFILE))
    now_s += LINE_EVERY_S
    handler(loop, trouble(errno.ENFILE))
    assert [record.getMessage().split("; ")[0] for record in caplog.records] == [
        "connections wait, since the system takes no more: Too many open files",
        "connections wait, since the system takes no more: Too many open files in system",
    ]
    assert all(record.levelno == logging.WARNING and not record.exc_info for record in caplog.records)


async def test_other_troubles_of_the_loop_are_told_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    handler, loop = ShortageLines(), asyncio.get_running_loop()
    handler(loop, {"message": "a callback failed", "exception": ValueError("of a bug")})
    handler(loop, trouble(errno.EPERM))
    assert [record.name for record in caplog.records] == ["asyncio"] * 2
    assert all(record.exc_info for record in caplog.records)
