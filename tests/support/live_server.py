"""The whole server on a free loopback port, in a thread: for tests that need a real connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from crosspool.server.run import KEEP_ALIVE_S
from tests.support.awaited import PATIENCE_S, until


@contextmanager
def live_server(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Serve `app`, on any free port unless one is named; gives its base URL.

    The engine's streams live on the server's own event loop.
    """
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False}
    config = uvicorn.Config(app, host="127.0.0.1", port=port, timeout_keep_alive=KEEP_ALIVE_S, **quiet)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    assert server.started, "the server ended while it started"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"the server did not stop within {PATIENCE_S:.0f} s"
