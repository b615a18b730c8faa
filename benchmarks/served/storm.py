"""A storm against one server: models come and go under their requests, queues overflow, clients leave, loads fail.

Everything is drawn from a seed; what clients must see is in `storm_requests.py`. At the end the server is told to stop
under full load, with requests that arrive while it does.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx2
import psutil

from benchmarks.served.soak import SoakResult, num_tasks, processes, running_server, settle, watch_memory
from benchmarks.served.soak_requests import LEFT
from benchmarks.served.storm_requests import ACTIONS, ADMIN, GREEDY, GUEST, TWIN, Scene, Statuses, ask, come
from crosspool.demo.scenario import demo_model_dirs

NUM_CLIENTS = 8
FLAGS = (
    *("--kv-pool-bytes", "12MiB", "--frame-bytes", "64KiB", "--max-num-seqs", "6", "--max-queue", "12"),
    *("--admin-api-key", "boss", "--shutdown-timeout", "20", "--log-level", "error"),
)
TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
LAST_ASKED = 40
"""Requests that are asked for around the moment of the signal."""


def run_storm(minutes: float, seed: int = 2026, flags: Sequence[str] = (), *, kills: bool = False) -> SoakResult:
    """Start a server with `flags` too, let the storm rage for `minutes`, see what is left, stop it under load.

    kills: processes of ranks are killed in it, at random.
    """
    with tempfile.TemporaryDirectory() as folder, running_server(*FLAGS, *flags) as (process, url, log_path):
        result = asyncio.run(_storm(url, psutil.Process(process.pid), Path(folder), 60 * minutes, seed, kills))
        result.exit_code = process.wait(STOP_TIMEOUT_S)
        result.log = Path(log_path).read_text(encoding="utf-8")
    return result


async def _storm(url: str, root: psutil.Process, folder: Path, seconds: float, seed: int, kills: bool) -> SoakResult:
    result = SoakResult(seconds)
    async with _client(url) as http:
        scene = await _scene(http, folder)
        await come(scene, random.Random(seed))  # so that what one load leaves in memory is there before
        await _guest_leaves(http)
        tasks, files = await num_tasks(http), sum(child.num_fds() for child in processes(root))
    scene = replace(scene, ranks_of=root if kills else None)
    deadline = time.monotonic() + seconds
    clients = [
        asyncio.create_task(_rage(url, scene, random.Random(seed + n), deadline, result)) for n in range(NUM_CLIENTS)
    ]
    await watch_memory(root, clients, result)
    async with _client(url) as http:
        await _guest_leaves(http)
    await settle(root, url, files, tasks, result)
    await _stop_under_load(url, scene, root, random.Random(seed), result)
    return result


def _client(url: str) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=4)
    return httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)


async def _scene(http: httpx2.AsyncClient, folder: Path) -> Scene:
    homes = demo_model_dirs()
    answers = {}
    for model in homes:
        answer = await http.post("/v1/completions", json={**GREEDY, "model": model})
        answers[model] = answer.json()["choices"][0]["text"]
    guest = folder / "guest"
    shutil.copytree(homes[TWIN], guest)
    return Scene(http, guest, _broken(homes[TWIN], folder), {**answers, GUEST: answers[TWIN]})


def _broken(home: Path, folder: Path) -> tuple[Path, ...]:
    """Copies of a model that do not load: no weights, weights that are cut, a configuration of other shapes."""
    none, cut, odd = (folder / name for name in ("none", "cut", "odd"))
    for copy in (none, cut, odd):
        shutil.copytree(home, copy)
    (none / "model.safetensors").unlink()
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    text = (odd / "config.json").read_text()
    (odd / "config.json").write_text(text.replace('"hidden_size": ', '"hidden_size": 1'))
    return none, cut, odd


async def _guest_leaves(http: httpx2.AsyncClient) -> None:
    """The guest, and what failed to come, are gone: no load goes on, and their memory is back."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            rows = (await http.get("/admin/models", headers=ADMIN)).json()["data"]
            rest = [row for row in rows if row["source"] is None or row["name"] not in demo_model_dirs()]
            if not rest:
                return
            for row in rest:
                await http.post(f"/admin/models/{row['name']}/unload", headers=ADMIN)
            await asyncio.sleep(0.1)


async def _rage(url: str, scene: Scene, draw: random.Random, deadline: float, result: SoakResult) -> None:
    async with _client(url) as http:
        own = replace(scene, http=http)
        while time.monotonic() < deadline:
            action = draw.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            result.statuses += await action(own, draw)


async def _stop_under_load(
    url: str, scene: Scene, root: psutil.Process, draw: random.Random, result: SoakResult
) -> None:
    """Requests before, at and after the signal: each is answered whole or refused, and none is left without an end."""
    async with _client(url) as http:
        own = replace(scene, http=http)
        asked = []
        for number in range(LAST_ASKED):
            asked.append(asyncio.create_task(_last(own, draw, draw.choice(sorted(demo_model_dirs())))))
            if number == LAST_ASKED // 2:
                root.send_signal(signal.SIGTERM)
            await asyncio.sleep(draw.uniform(0, 0.02))
        for seen in await asyncio.gather(*asked):
            result.statuses += seen


async def _last(scene: Scene, draw: random.Random, model: str) -> Statuses:
    """One of the last requests: as ever, or nobody listens any more."""
    with suppress(httpx2.ConnectError):
        return await ask(scene, draw, model)
    return Statuses([LEFT])
