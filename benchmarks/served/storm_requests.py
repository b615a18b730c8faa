"""What clients of a storm do at once: bursts that overflow a queue and leave it, models that come and go under their
requests, loads that fail, clients that never read, limits that change.

Each action raises AssertionError where the server breaks a promise, and returns the HTTP statuses it saw.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil

from benchmarks.served.soak_requests import LEFT

GUEST = "guest"  # the model that comes and goes; its weights are those of TWIN
TWIN = "holmes"
PROMPT = "It was the morning of a long day, and the letter had not come. " * 6
GREEDY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
BURST = 30
ADMIN = {"Authorization": "Bearer boss"}
KILLS = 0.1  # of the times that a client thinks of it
KILLED = -9  # stands for a status where a rank was killed
UNREAD_BYTES = 4096  # what the system keeps for a client that does not read

REFUSALS = {404: {"model_not_found"}, 429: {"queue_full"}, 503: {"model_not_ready", "model_removed", "shutting_down"}}
"""How a request may be refused while models come and go, by status."""

Statuses = Counter[int]


@dataclass(frozen=True, slots=True)
class Scene:
    """What actions know: the server, model directories that load and that do not, and the answer there should be."""

    http: httpx2.AsyncClient
    guest: Path
    broken: tuple[Path, ...]
    answers: dict[str, str]  # by model: to GREEDY
    ranks_of: psutil.Process | None = None  # the server whose ranks' processes may be killed


async def read_events(response: httpx2.Response) -> tuple[str, str | None, dict[str, Any] | None]:
    """Text, finish reason and error of one streamed completion; exactly one [DONE], which is last."""
    text, finish, error, done = "", None, None, 0
    async for line in response.aiter_lines():
        assert not done or not line, f"after [DONE] came {line!r}"
        if line == "data: [DONE]":
            done += 1
        elif line.startswith("data: "):
            piece = json.loads(line.removeprefix("data: "))
            error = piece.get("error", error)
            for choice in piece.get("choices", ()):
                text += choice["text"]
                finish = choice["finish_reason"] or finish
    assert done == 1, f"a stream with {done} [DONE] after {text[-60:]!r}"
    assert (finish is None) == (error is not None), f"a stream that ended with {finish!r} and {error!r}"
    return text, finish, error


def check_refusal(response: httpx2.Response) -> int:
    """The status of a refusal that may be, with a code that says so and, to come again, when."""
    status = response.status_code
    found = response.json()["error"]
    assert found["code"] in REFUSALS.get(status, ()), f"{status}: {found}"
    assert status == 404 or int(response.headers["retry-after"]) >= 1, response.headers
    return status


async def ask(scene: Scene, draw: random.Random, model: str) -> Statuses:
    """The greedy answer is the same whatever else happens: after a reload, beside others, after evictions."""
    streams = draw.random() < 0.5
    body = {**GREEDY, "model": model, "stream": streams}
    async with scene.http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return Counter([check_refusal(response)])
        if not streams:
            choice = json.loads(await response.aread())["choices"][0]
            text, error = choice["text"], None
        else:
            text, _, error = await read_events(response)
    if error is not None:
        assert model == GUEST, error
        assert error["code"] == "model_removed", error
        return Counter([503])
    assert text == scene.answers[model], f"{model}: {text!r} in place of {scene.answers[model]!r}"
    return Counter([200])


async def ask_any(scene: Scene, draw: random.Random) -> Statuses:
    return await ask(scene, draw, draw.choice(["austen", TWIN, "shakespeare", GUEST, GUEST]))


async def burst(scene: Scene, draw: random.Random) -> Statuses:
    """More at once than a queue holds; about half of them leave, most while they wait in it. The others get it all."""
    model = draw.choice(["austen", "shakespeare", GUEST])
    asked = [asyncio.create_task(ask(scene, draw, model)) for _ in range(BURST)]
    for task in draw.sample(asked, BURST // 2):
        await asyncio.sleep(draw.uniform(0, 0.05))
        task.cancel()
    seen: Statuses = Counter()
    for end in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(end, asyncio.CancelledError):
            seen[LEFT] += 1
        elif isinstance(end, BaseException):
            raise end
        else:
            seen += end
    return seen


async def never_read(scene: Scene, draw: random.Random) -> Statuses:
    """A client that asks for a long stream and does not read: it harms nobody, and gets all if it reads at last."""
    where = urlsplit(str(scene.http.base_url))
    body = json.dumps({"model": "austen", "prompt": "x", "max_tokens": 300, "n": 4, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, (where.hostname, where.port))
        await loop.sock_sendall(raw, f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        await asyncio.sleep(draw.uniform(0, 4))
        if draw.random() < 0.5:
            return Counter([LEFT])
        found = b""
        async with asyncio.timeout(60):
            while piece := await loop.sock_recv(raw, 65536):
                found += piece
    status = int(found.split(maxsplit=2)[1])
    if status == 200:
        assert found.count(b"data: [DONE]") == 1, found[-300:]
        assert found.count(b'"finish_reason":"length"') == 4, found[-300:]
    return Counter([status])


async def come(scene: Scene, draw: random.Random) -> Statuses:
    """Load the guest: once, twice at the same moment, or leaving before it is there."""
    path = f"/admin/models/{GUEST}/load"
    body = {"path": str(scene.guest), "aliases": ["visitor"], "wait": draw.random() < 0.7}
    loads = [scene.http.post(path, json=body, headers=ADMIN) for _ in range(draw.choice((1, 1, 3)))]
    if draw.random() < 0.2:
        try:
            async with asyncio.timeout(draw.uniform(0, 0.1)):
                await asyncio.gather(*loads)
        except TimeoutError:
            return Counter([LEFT])
        return Counter()
    return _admin(await asyncio.gather(*loads), {200, 202, 409} | _lost(scene))


async def go(scene: Scene, draw: random.Random) -> Statuses:
    """Unload the guest under its requests; some unloads meet another unload, or a load."""
    path = f"/admin/models/{GUEST}/unload"
    body = {"drain": draw.random() < 0.5, "wait": draw.random() < 0.7}
    goes = [scene.http.post(path, json=body, headers=ADMIN) for _ in range(draw.choice((1, 1, 2)))]
    return _admin(await asyncio.gather(*goes), {200, 202, 404, 409})


async def fail_to_come(scene: Scene, draw: random.Random) -> Statuses:
    """A load that fails: at its small files, at the weights' header, or half-way; then the name is free again."""
    name = f"broken-{draw.randrange(3)}"
    body = {"path": str(draw.choice(scene.broken))}
    seen = _admin(
        [await scene.http.post(f"/admin/models/{name}/load", json=body, headers=ADMIN)], {400, 409} | _lost(scene)
    )
    if draw.random() < 0.5:
        seen += _admin([await scene.http.post(f"/admin/models/{name}/unload", headers=ADMIN)], {200, 404, 409})
    return seen


async def change_limits(scene: Scene, draw: random.Random) -> Statuses:
    """A floor for one model, a ceiling for another, as requests of both run; now and then what can be given back is."""
    change = {
        "models": {
            "austen": {"floor": draw.choice((0, "2MiB"))},
            "shakespeare": {"ceiling": draw.choice((None, "8MiB"))},
        }
    }
    seen = _admin([await scene.http.patch("/admin/limits", json=change, headers=ADMIN)], {200})
    if draw.random() < 0.3:
        seen += _admin([await scene.http.post("/admin/prefix_cache/trim", json={}, headers=ADMIN)], {200})
    return seen


async def look(scene: Scene, draw: random.Random) -> Statuses:
    """Health stays good, counters only grow, and the memory of a rank is its budget in every state."""
    path = draw.choice(("/health", "/health/ready", "/metrics", "/v1/models", "/stats", "/admin/models"))
    response = await scene.http.get(path, headers=ADMIN)
    assert response.status_code == 200, f"{path}: {response.text[:300]}"
    if path == "/stats":
        for pool in response.json()["pools"]:
            parts = [pool[f"frames_{state}"] for state in ("used", "reserved", "reusable", "free")]
            assert min(parts) >= 0, pool
            assert sum(parts) == pool["frames_budget"], pool
    return Counter([200])


async def kill_a_rank(scene: Scene, draw: random.Random) -> Statuses:
    """Now and then, if ranks may be killed: what needs it waits, and every answer is as it would have been."""
    if scene.ranks_of is not None and draw.random() < KILLS:
        draw.choice(scene.ranks_of.children()).kill()
        return Counter([KILLED])
    return Counter()


def _lost(scene: Scene) -> set[int]:
    """How a load may end whose rank is killed."""
    return {503} if scene.ranks_of is not None else set()


def _admin(responses: list[httpx2.Response], allowed: set[int]) -> Statuses:
    for response in responses:
        assert response.status_code in allowed, f"{response.request.url}: {response.status_code}: {response.text[:300]}"
    return Counter(response.status_code for response in responses)


ACTIONS = {
    ask_any: 6,
    burst: 1,
    never_read: 1,
    come: 3,
    go: 2,
    fail_to_come: 1,
    change_limits: 1,
    look: 2,
    kill_a_rank: 1,
}
"""What clients do, and how often."""
