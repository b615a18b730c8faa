"""Minutes of mixed traffic on a server of the demo models, in processes of their own, and what is left afterwards.

Traffic: answers read whole, streams left in the middle, whole answers not waited for, several choices, chats in three
APIs, answers in a grammar, bad bodies, prompts far too long, metrics, health and the page's stream; and what
`soak_edges` has. Memory is read every few seconds for every process of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil

from benchmarks.served.soak_edges import EDGES
from benchmarks.served.soak_requests import ACTIONS, LEFT
from crosspool.units import MiB

NUM_CLIENTS = 8
SAMPLE_EVERY_S = 2.0
WARM_UP = 0.3  # of the whole time: caches and allocators fill
WINDOW = 0.3  # of what follows: the first and the last of it are compared
START_TIMEOUT_S = 120
FILL_TIMEOUT_S = 900  # beside other work of the machine
SETTLE_S = 15
WEIGHTS = {**dict(zip(ACTIONS, (6, 6, 4, 2, 2, 2, 4), strict=True)), **dict.fromkeys(EDGES, 1)}
WORDS = ("morning", "ship", "letter", "king")
MODELS = ("austen", "holmes", "shakespeare")
KV_POOL = "64MiB"  # small enough to be used to the last frame


@dataclass(slots=True)
class SoakResult:
    """What was asked, and what the server's processes held over time."""

    seconds: float
    statuses: Counter[int] = field(default_factory=Counter)
    rss: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # process -> (seconds, bytes)
    sockets_left: int = 0
    files_grown: int = 0
    frames_left: int = 0
    sequences_left: int = 0
    tasks_left: int = 0
    threads_grown: int = 0
    unaccounted: int = 0  # sequences that were accepted and neither run nor have ended in a way that is counted
    exit_code: int | None = None
    log: str = ""

    @property
    def num_left(self) -> int:
        """Frames, sequences, tasks and sockets that nobody uses and nobody let go of."""
        return self.frames_left + self.sequences_left + self.sockets_left + max(0, self.tasks_left)

    def figures(self) -> dict[str, Any]:
        """What is worth keeping, for JSON."""
        return {
            "minutes": self.seconds / 60,
            "growth_percent": self.growth_percent(),
            "rss_mib": {name: round(samples[-1][1] / MiB, 1) for name, samples in self.rss.items()},
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "num_requests": self.statuses.total(),
            "num_left": self.num_left,
        }

    def growth_percent(self, level: Callable[[Sequence[int]], float] = statistics.median) -> dict[str, float]:
        """By process: memory of the last window over that of the first after the warm-up, each as its `level`.

        The lowest of a window is what counts where models come and go: what is kept for good lifts it too.
        """
        found = {}
        for name, samples in self.rss.items():
            kept = [size for at, size in samples if at >= WARM_UP * self.seconds]
            count = max(1, int(len(kept) * WINDOW))
            found[name] = 100 * (level(kept[-count:]) / level(kept[:count]) - 1)
        return found


def run_soak(minutes: float, seed: int = 2026) -> SoakResult:
    """Start a server, load it for `minutes`, let it settle, look at what is left, stop it."""
    with running_server("--kv-pool-bytes", KV_POOL, "--log-level", "warning") as (process, url, log_path):
        result = asyncio.run(_soak(process, url, 60 * minutes, seed))
        process.send_signal(signal.SIGTERM)
        result.exit_code = process.wait(60)
        with open(log_path, encoding="utf-8") as log:
            result.log = log.read()
    return result


@contextlib.contextmanager
def running_server(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """`crosspool serve` of the demo models in processes of its own, ready; its URL and the file of its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile(prefix="crosspool-soak-", suffix=".log", delete=False) as log:
        log_path = log.name
        command = [sys.executable, "-m", "crosspool", "serve", "--port", str(port), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{url}/health/ready").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                with open(log_path, encoding="utf-8") as log:
                    raise RuntimeError(f"the server did not get ready: {log.read()[-2000:]}")
            time.sleep(0.2)
        yield process, url, log_path
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        os.unlink(log_path)


async def _soak(process: subprocess.Popen[bytes], url: str, seconds: float, seed: int) -> SoakResult:
    result = SoakResult(seconds)
    root = psutil.Process(process.pid)
    async with httpx2.AsyncClient(base_url=url, timeout=FILL_TIMEOUT_S) as http:
        await _fill(http)
        tasks = await num_tasks(http)
        files, threads = (sum(map(count, processes(root))) for count in (psutil.Process.num_fds, num_threads))
    deadline = time.monotonic() + seconds
    clients = [asyncio.create_task(_client(url, random.Random(seed + n), deadline, result)) for n in range(NUM_CLIENTS)]
    await watch_memory(root, clients, result)
    await settle(root, url, files, tasks, result)
    result.threads_grown = sum(map(num_threads, processes(root))) - threads
    return result


async def watch_memory(root: psutil.Process, clients: list[asyncio.Task[None]], result: SoakResult) -> None:
    """Read the memory of every process until the clients have ended; what one raises is raised at once."""
    started = time.monotonic()
    left: set[asyncio.Task[None]] = set(clients)
    while left:
        for child in processes(root):
            with contextlib.suppress(psutil.NoSuchProcess):  # a rank that was killed
                name = f"{child.pid} {' '.join(child.cmdline()[-2:])[:60]}"
                result.rss.setdefault(name, []).append((time.monotonic() - started, child.memory_info().rss))
        ended, left = await asyncio.wait(left, timeout=SAMPLE_EVERY_S, return_when=asyncio.FIRST_EXCEPTION)
        for client in ended:
            client.result()


async def _fill(http: httpx2.AsyncClient) -> None:
    """Use every frame once, since memory counts from its first use; the queues are filled too."""
    body = {"prompt": "It was " * 100, "max_tokens": 400, "ignore_eos": True}
    asked = [http.post("/v1/completions", json={**body, "model": model}) for model in MODELS for _ in range(14)]
    answers = await asyncio.gather(*asked)
    assert all(answer.status_code == 200 for answer in answers), Counter(answer.status_code for answer in answers)


async def num_tasks(http: httpx2.AsyncClient) -> int:
    """Tasks of the server's event loop, that of this request and of its connection included."""
    found = re.search(r"^crosspool:server_tasks (\d+)", (await http.get("/metrics")).text, re.MULTILINE)
    assert found is not None, "the server tells no tasks"
    return int(found[1])


async def settle(root: psutil.Process, url: str, files: int, tasks: int, result: SoakResult) -> None:
    """Wait until nothing is left, at most SETTLE_S, and note what is."""
    until = time.monotonic() + SETTLE_S
    while True:
        async with httpx2.AsyncClient(base_url=url, timeout=30) as http:
            stats = (await http.get("/stats")).json()
            result.tasks_left = await num_tasks(http) - tasks
        result.frames_left = sum(pool["frames_used"] + pool["frames_reserved"] for pool in stats["pools"])
        counts = ("num_queued", "num_prefilling", "num_decoding", "num_parked")
        result.unaccounted = sum(
            abs(model["num_accepted"] - sum(model["num_finished"].values())) for model in stats["models"]
        )
        result.sequences_left = sum(model[count] for model in stats["models"] for count in counts)
        await asyncio.sleep(0.5)
        connections = [c for child in processes(root) for c in child.net_connections("tcp")]
        result.sockets_left = sum(connection.status == "ESTABLISHED" for connection in connections)
        result.files_grown = sum(child.num_fds() for child in processes(root)) - files
        left = result.frames_left or result.sequences_left or result.sockets_left or result.files_grown > 0
        left = left or result.tasks_left > 0 or result.unaccounted
        if not left or time.monotonic() > until:
            return


def num_threads(process: psutil.Process) -> int:
    return int(process.num_threads())


def processes(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


async def _client(url: str, draw: random.Random, deadline: float, result: SoakResult) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
        while time.monotonic() < deadline:
            body = {
                "model": draw.choice(MODELS),
                "prompt": "It was the " + " ".join(draw.choices(WORDS, k=draw.randint(1, 60))),
                "max_tokens": draw.choice((1, 8, 32, 96)),
                "temperature": draw.choice((0, 0.8)),
                "ignore_eos": True,
            }
            action = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            try:
                status = await action(http, body, draw)
            except httpx2.TimeoutException:
                status = LEFT
            result.statuses[status] += 1
