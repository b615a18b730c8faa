"""Few lines where files do not suffice and where bytes are no HTTP; a traceback where there is a bug."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from crosspool.config import ServerConfig
from crosspool.errors import CheckpointError
from crosspool.server.loop_errors import LINE_EVERY_S, LoopErrors
from crosspool.server.run import listen, serve
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixtures import fake_app


def trouble(number: int) -> dict[str, object]:
    """What asyncio says where `accept` fails."""
    return {"message": "socket.accept() out of system resource", "exception": OSError(number, os.strerror(number))}


async def test_connections_that_cannot_be_taken_are_told_now_and_then_without_a_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("crosspool.server.loop_errors.time.monotonic", lambda: now_s)
    handler, loop = LoopErrors(), asyncio.get_running_loop()
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
    handler, loop = LoopErrors(), asyncio.get_running_loop()
    handler(loop, {"message": "a callback failed", "exception": ValueError("of a bug")})
    handler(loop, trouble(errno.EPERM))
    assert [record.name for record in caplog.records] == ["asyncio"] * 2
    assert all(record.exc_info for record in caplog.records)


class ClosableFake(FakeEngine):
    async def close(self, *, drain_s: float = 0.0) -> None:
        """Nothing to let go of."""


@pytest.mark.parametrize("path", ["/nope", "/v1/models"])
async def test_bytes_that_are_no_http_behind_an_answer_leave_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    engine, config, done = ClosableFake(), ServerConfig(port=0), asyncio.Event()

    async def load() -> None:
        await done.wait()
        raise CheckpointError("enough seen")

    with listen(config) as bound, socket.socket() as raw:
        serving = asyncio.create_task(serve(fake_app(engine, tmp_path), engine, load, bound, config))
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, bound.getsockname())
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        await loop.sock_sendall(raw, head.encode())
        assert (await loop.sock_recv(raw, 65536)).startswith(b"HTTP/1.1 ")
        await loop.sock_sendall(raw, b"no length\r\n")
        with suppress(ConnectionResetError):
            while await loop.sock_recv(raw, 65536):  # the rest of the answer, and then the end
                pass
        done.set()
        with pytest.raises(CheckpointError, match="enough seen"):
            await serving
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
