"""Listening and draining, without a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from pathlib import Path

import httpx2
import pytest

from crosspool.config import ServerConfig
from crosspool.errors import CheckpointError, CrossPoolError
from crosspool.server.run import PROBES, SignalledServer, _uvicorn_config, listen, run_loop, serve
from tests.support.fake_engine import FakeEngine, Script
from tests.support.server_fixtures import fake_app

MANY_WORDS = 4_000_000
"""More than a connection's buffers take."""


class ClosableFake(FakeEngine):
    closed = 0

    async def close(self, *, drain_s: float = 0.0) -> None:
        self.closed += 1


def test_a_taken_port_is_told_with_a_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CrossPoolError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another"):
            listen(ServerConfig(port=port))


def test_an_address_that_is_not_ours_is_told() -> None:
    with pytest.raises(CrossPoolError, match=r"cannot listen on 203\.0\.113\.1:8000"):
        listen(ServerConfig(host="203.0.113.1"))
    with pytest.raises(CrossPoolError, match=r"cannot listen on no\.such\.invalid:8000"):
        listen(ServerConfig(host="no.such.invalid"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_any_free_port(host: str) -> None:
    with listen(ServerConfig(host=host, port=0)) as bound:
        assert bound.getsockname()[1] > 0


def test_a_listening_socket_is_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    with listen(ServerConfig(host="0.0.0.0", port=0, api_keys=("k",))) as one:
        port = one.getsockname()[1]
        os.set_inheritable(one.fileno(), True)
        with listen(ServerConfig(listen_fd=one.detach())) as other:
            assert other.getsockname()[1] == port
            assert not other.get_inheritable()  # ranks would keep the port after the server
    assert [record.getMessage() for record in caplog.records] == [
        "no api_key is set, and other machines may reach 0.0.0.0: whoever does may use it"
    ]


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_connections_are_probed_for_clients_that_vanished(is_handed_over: bool) -> None:
    with contextlib.ExitStack() as stack:
        if is_handed_over:
            given = socket.create_server(("127.0.0.1", 0))
            listener = stack.enter_context(listen(ServerConfig(listen_fd=given.detach())))
        else:
            listener = stack.enter_context(listen(ServerConfig(port=0)))
        stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        accepted = stack.enter_context(listener.accept()[0])
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        waits = [accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in PROBES]
        assert waits[0] + waits[1] * waits[2] == 120


def test_what_is_handed_over_has_to_listen() -> None:
    with socket.socket() as idle, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        for wrong in (idle, datagrams):
            with pytest.raises(CrossPoolError, match=f"listen_fd is {wrong.fileno()}, no TCP socket that listens"):
                listen(ServerConfig(listen_fd=wrong.fileno()))
    with pytest.raises(CrossPoolError, match="listen_fd is 12345: Bad file descriptor"):
        listen(ServerConfig(listen_fd=12345))


def test_a_slash_behind_the_root_path_means_nothing(tmp_path: Path) -> None:
    app = fake_app(ClosableFake(), tmp_path)
    for told, meant in (("/", ""), ("/api/", "/api"), ("/api", "/api")):
        assert _uvicorn_config(app, ServerConfig(root_path=told)).root_path == meant


def test_idle_connections_outlive_those_of_clients_and_proxies(tmp_path: Path) -> None:
    """Else one sends a request on a connection that is just being closed: 60 s is what most of them wait."""
    assert _uvicorn_config(fake_app(ClosableFake(), tmp_path), ServerConfig()).timeout_keep_alive > 60


async def test_a_failed_load_ends_the_server_and_closes_the_engine(tmp_path: Path) -> None:
    engine = ClosableFake()

    async def load() -> None:
        raise CheckpointError("no weights")

    config = ServerConfig(port=0)
    with listen(config) as bound, pytest.raises(CheckpointError, match="no weights"):
        await serve(fake_app(engine, tmp_path), engine, load, bound, config)
    assert engine.closed == 1


async def test_health_answers_while_models_load(tmp_path: Path) -> None:
    engine = ClosableFake()
    engine.states["tiny"] = "loading"
    release = asyncio.Event()

    async def load() -> None:
        await release.wait()
        raise CheckpointError("enough seen")

    config = ServerConfig(port=0)
    with listen(config) as bound:
        serving = asyncio.create_task(serve(fake_app(engine, tmp_path), engine, load, bound, config))
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}") as http:
            assert (await http.get("/health")).status_code == 200
            ready = await http.get("/health/ready")
            assert (ready.status_code, ready.json()["detail"]) == (503, "loading tiny")
            assert (await http.get("/v1/models")).json()["data"][0]["crosspool"]["state"] == "loading"
        release.set()
        with pytest.raises(CheckpointError, match="enough seen"):
            await serving


async def test_a_client_that_never_reads_is_cut_in_one_line_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("crosspool.server.run.LAST_WORDS_S", 0.2)
    engine = ClosableFake()
    engine.scripts["tiny"] = Script(words=("word " * MANY_WORDS, " end"))
    asked = asyncio.Event()

    async def load() -> None:
        await asked.wait()
        while engine.running or not engine.requests:
            await asyncio.sleep(0.01)
        raise CheckpointError("the engine has ended")

    config = ServerConfig(port=0)
    with listen(config) as bound, socket.socket() as unread:
        serving = asyncio.create_task(serve(fake_app(engine, tmp_path), engine, load, bound, config))
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(unread, bound.getsockname())
        body = b'{"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(unread, head.encode() + body)
        asked.set()
        with pytest.raises(CheckpointError, match="the engine has ended"):
            await serving
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in said] == ["1 connection(s) that did not read their answers are cut"]
    assert not any(record.exc_info for record in said)


@pytest.mark.parametrize(("before", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
async def test_the_terminals_end_stops_the_server_unless_it_was_told_to_ignore_it(
    tmp_path: Path, before: signal.Handlers, stops: bool
) -> None:
    found = signal.signal(signal.SIGHUP, before)
    try:
        server = SignalledServer(_uvicorn_config(fake_app(ClosableFake(), tmp_path), ServerConfig()))
        with server.capture_signals():
            signal.raise_signal(signal.SIGHUP)
            await asyncio.sleep(0)
            assert server.stop_asked.is_set() == stops
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, found)


def test_the_loop_gives_back_what_its_coroutine_returns_or_raises() -> None:
    async def find(error: Exception | None) -> int:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return 7

    assert run_loop(find(None)) == 7
    with pytest.raises(CheckpointError, match="no weights"):
        run_loop(find(CheckpointError("no weights")))
