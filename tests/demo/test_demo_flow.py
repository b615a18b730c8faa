"""`crosspool demo` as a newcomer runs it: a real server, real HTTP, exit code 0."""

import json
import socket
import subprocess
import sys

from crosspool.demo.scenario import DEMO_MODELS, demo_requests


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
