"""Clients that still send when they are answered: they see the answer, and are not read for ever."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from http.client import HTTPResponse
from pathlib import Path

import pytest

from tests.support.awaited import PATIENCE_S
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import live_server
from tests.support.server_fixtures import fake_app

ENDLESS = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"1000\r\n" + b" " * 4096 + b"\r\n"


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def answer(connection: socket.socket) -> HTTPResponse:
    """Read to its end."""
    found = HTTPResponse(connection)
    found.begin()
    found.read()
    return found


def send(connection: socket.socket) -> None:
    """For as long as a test waits."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        connection.sendall(CHUNK)


@pytest.mark.parametrize(
    ("path", "key", "status"), [("/v1/completions", "k", 413), ("/v1/completions", "", 401), ("/nowhere", "k", 404)]
)
def test_a_client_that_sends_for_ever_sees_its_answer_and_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, key: str, status: int
) -> None:
    monkeypatch.setattr("crosspool.server.lingering.LINGER_S", 0.3)
    app = fake_app(FakeEngine(), tmp_path, max_body_bytes=10_000, api_keys=("k",))
    with live_server(app) as url, closing(connected(url)) as connection:
        head = ENDLESS % path.encode() + CHUNK * 3
        connection.sendall(head.replace(b"Host: x", f"Host: x\r\nX-API-Key: {key}".encode()))
        seen = answer(connection)
        assert (seen.status, seen.getheader("connection")) == (status, "close")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send(connection)


def test_a_client_that_stops_within_a_large_body_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosspool.server.lingering.LINGER_S", 0.3)
    app = fake_app(FakeEngine(), tmp_path, max_body_bytes=10_000)
    with live_server(app) as url, closing(connected(url)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n")
        assert answer(connection).status == 413, "before any of the body has come"
        connection.sendall(b" " * 5000)
        assert connection.recv(4096) == b""


def test_a_body_of_no_declared_length_is_taken_and_its_connection_stays(tmp_path: Path) -> None:
    body = b'{"model": "tiny", "prompt": "hi", "max_tokens": 2}'
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with live_server(fake_app(FakeEngine(), tmp_path)) as url, closing(connected(url)) as connection:
        for _ in range(2):
            connection.sendall(ENDLESS % b"/v1/completions" + chunks)
            seen = answer(connection)
            assert (seen.status, seen.getheader("connection")) == (200, None)
