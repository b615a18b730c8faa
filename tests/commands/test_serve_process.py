"""`crosspool serve` as a process: two pools in two processes, signals, drains, failed starts, lost workers."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.awaited import PATIENCE_S, until
from tests.support.server_fixtures import events
from tests.support.server_log import ServerLog
from tests.support.tiny_models import write_tiny_model

ENDLESS = {"model": "P", "prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "P"
    return write_tiny_model(path, "qwen3_moe", num_layers=2, max_position_embeddings=4096)


@contextmanager
def served(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process that is ready, and its URL. It must end within seconds of SIGTERM if it has not by then."""
    command = [sys.executable, "-m", "crosspool", "serve", str(model), "--port", "0", "--frame-bytes", "64KiB"]
    process = subprocess.Popen([*command, "--kv-pool-bytes", "64MiB", *options], stderr=subprocess.PIPE, text=True)
    log = ServerLog(process)
    try:
        yield process, log.url()
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            log.close()


def read_stream(url: str, body: dict[str, Any], found: list[str], started: threading.Event) -> None:
    body = {**body, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            found.append(line)
            if line.startswith("data: "):
                started.set()


def start_stream(url: str, body: dict[str, Any]) -> tuple[threading.Thread, list[str]]:
    found: list[str] = []
    started = threading.Event()
    thread = threading.Thread(target=read_stream, args=(url, body, found, started), daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    return thread, found


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_running_streams_with_an_error_and_done(model: Path, number: signal.Signals) -> None:
    with served(model, "--shutdown-timeout", "1.5") as (process, url):
        workers = children(process)
        assert len(workers) == 2
        thread, found = start_stream(url, {**ENDLESS, "max_tokens": 4000})
        process.send_signal(number)
        assert process.wait(30) == 0
        thread.join(5)
        got = events("\n".join(found))
        assert got[-1] == "[DONE]"
        assert got.count("[DONE]") == 1
        assert got[-2]["error"]["code"] == "shutting_down"
        assert not [worker for worker in workers if worker.is_running()]


def test_running_requests_may_finish_while_it_drains(model: Path) -> None:
    with served(model, "--shutdown-timeout", "20") as (process, url):
        thread, found = start_stream(url, {**ENDLESS, "max_tokens": 300})
        process.terminate()
        assert process.wait(30) == 0
        thread.join(5)
        got = events("\n".join(found))
        assert got[-1] == "[DONE]"
        assert got[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_drains_refuses_and_a_second_signal_skips_the_wait(model: Path, number: signal.Signals) -> None:
    with served(model, "--shutdown-timeout", "60") as (process, url), httpx2.Client(base_url=url) as http:
        thread, found = start_stream(url, {**ENDLESS, "max_tokens": 4000})
        process.send_signal(number)
        until(lambda: http.get("/health/ready").status_code == 503)
        assert http.get("/health/ready").json()["status"] == "draining"
        refused = http.post("/v1/completions", json=ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        process.terminate()
        assert process.wait(30) == 0
        thread.join(5)
        assert events("\n".join(found))[-1] == "[DONE]"


@pytest.mark.parametrize("rank", ["w0", "kv0"])
def test_a_killed_worker_comes_back_and_the_stream_goes_on(model: Path, rank: str) -> None:
    body = {**ENDLESS, "max_tokens": 250}
    with served(model) as (process, url):
        undisturbed = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        (worker,) = [child for child in children(process) if child.cmdline()[-1] == rank]
        thread, found = start_stream(url, body)
        os.kill(worker.pid, signal.SIGKILL)  # while the stream goes on
        thread.join(60)
        got = events("\n".join(found))
        assert got[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in got[:-1]) == undisturbed
        stats = httpx2.get(f"{url}/stats").json()
        assert stats["num_ranks_lost"] == 1
        assert stats["health"]["status"] == "idle"


def test_a20_a_lost_worker_without_recovery_ends_the_stream_within_a_second(model: Path) -> None:
    with served(model, "--recovery-timeout", "0") as (process, url):
        (worker,) = [child for child in children(process) if child.cmdline()[-1] == "w0"]
        thread, found = start_stream(url, {**ENDLESS, "max_tokens": 4000})
        worker.kill()
        thread.join(3)
        assert not thread.is_alive()
        got = events("\n".join(found))
        assert got[-1] == "[DONE]"
        assert got[-2]["error"]["code"] == "worker_lost"
        short = {**ENDLESS, "max_tokens": 3}
        until(lambda: httpx2.post(f"{url}/v1/completions", json=short, timeout=60).status_code == 200)


def test_server_and_ranks_may_open_as_many_files_as_the_administrator_allows(model: Path) -> None:
    before, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, allowed))
    try:
        with served(model) as (process, _):
            limits = [each.rlimit(psutil.RLIMIT_NOFILE) for each in (psutil.Process(process.pid), *children(process))]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, allowed))
    assert limits == [(allowed, allowed)] * 3


def test_with_json_logs_every_line_is_an_object(model: Path) -> None:
    command = [sys.executable, "-m", "crosspool", "serve", str(model), "--port", "0", "--log-format", "json"]
    process = subprocess.Popen([*command, "--kv-pool-bytes", "16MiB"], stderr=subprocess.PIPE, text=True)
    log = ServerLog(process)
    try:
        assert httpx2.get(f"{log.url()}/health/ready").status_code == 200
    finally:
        process.terminate()
        assert process.wait(15) == 0
        log.close()
    messages = [json.loads(line)["message"] for line in log.lines]
    assert [sum(message.startswith(word) for message in messages) for word in ("loaded P: ", "serving P on ")] == [1, 1]


def test_a_model_that_does_not_load_ends_the_start_in_one_line(tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path / "broken", "qwen3_moe", num_layers=1)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    command = [sys.executable, "-m", "crosspool", "serve", str(broken), "--port", "0", "--log-level", "critical"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert "model.safetensors" in line
