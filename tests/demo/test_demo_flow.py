"""`crosspool demo` as a newcomer runs it: a real server, real HTTP, exit code 0."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from crosspool.demo.run import _listener, _server, _url
from crosspool.demo.scenario import DEMO_MODELS, demo_requests
from crosspool.errors import CrossPoolError


def _demo(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "crosspool", "demo", *arguments], capture_output=True, text=True, timeout=110
    )


def test_the_demo_serves_all_three_models_and_gives_every_page_back():
    done = _demo("--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["models"]) == set(report["answers"]) == set(DEMO_MODELS)
    assert sum(figures["requests"] for figures in report["models"].values()) == sum(map(len, demo_requests()))
    assert all(len(answer.split()) > 3 for answer in report["answers"].values())
    assert report["pool"]["peak_frames"] < 0.85 * report["pool"]["separate_caches_frames"], "sharing saved nothing"
    assert sum(report["samples"][-1]["frames_used"].values()) == 0


def test_ctrl_c_of_a_terminal_reaches_the_demo_alone_which_ends_its_server():
    with _server(_listener("127.0.0.1", 0), Console(quiet=True)) as server:
        os.kill(server.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(timeout=0.3)
    assert server.returncode is not None


def test_ctrl_c_while_the_server_is_begun_ends_it_too(monkeypatch: pytest.MonkeyPatch):
    begun: list[subprocess.Popen[bytes]] = []

    def begin(command: list[str], **_: object) -> "subprocess.Popen[bytes]":
        begun.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # to this thread, which holds it back
        return begun[0]

    monkeypatch.setattr("crosspool.demo.run.subprocess", SimpleNamespace(Popen=begin))
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt), _server(_listener("127.0.0.1", 0), Console(quiet=True)):
            pytest.fail("a Ctrl-C went by")
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert begun[0].returncode is not None


def test_a_host_that_is_not_here_is_a_one_line_error():
    done = _demo("--host", "192.0.2.1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot listen on 192.0.2.1")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_taken_port_is_a_one_line_error_and_never_another_server():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = _demo("--port", str(port))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use")


def test_a_host_of_ipv6_has_a_port_and_an_address_in_brackets():
    with _listener("::1", None) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(CrossPoolError, match=rf"cannot listen on ::1:{port}: .*; give another --host or --port"):
            _listener("::1", port)
    assert _url("::1", port) == f"http://[::1]:{port}"
    assert _url("127.0.0.1", 8000) == "http://127.0.0.1:8000"


def test_demos_that_start_together_have_ports_of_their_own_from_the_beginning():
    with _listener("127.0.0.1", None) as one, _listener("127.0.0.1", None) as other:
        assert one.getsockname()[1] != other.getsockname()[1]
