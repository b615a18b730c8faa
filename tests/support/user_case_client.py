"""What the user cases share: two tiny models on one pair of pools, and requests to their server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.awaited import soon
from tests.support.live_deployment import LiveDeployment
from tests.support.server_fixtures import events

CONTEXT = 1024
GOOD = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10, "temperature": 0}


def deployment(directories: dict[str, Path], kv_pool_bytes: int = 32 * MiB, **scheduling: Any) -> DeploymentConfig:
    return DeploymentConfig(
        models=tuple(
            ModelConfig(source=str(path), name=name, page_tokens=16, aliases=("nickname",) if name == "P" else ())
            for name, path in directories.items()
        ),
        pools=PoolsConfig(layout="inprocess", kv_pool_bytes=kv_pool_bytes, frame_bytes=64 * KiB),
        scheduling=SchedulingConfig(**scheduling),
    )


def connect(live: LiveDeployment) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(base_url=live.url, timeout=60, limits=limits)


async def good_answers(http: httpx2.AsyncClient) -> list[str]:
    answers = [await http.post("/v1/chat/completions", json={**GOOD, "model": name}) for name in ("P", "Q")]
    assert [answer.status_code for answer in answers] == [200, 200]
    return [answer.json()["choices"][0]["message"]["content"] for answer in answers]


async def until_idle(live: LiveDeployment) -> None:
    """`LiveDeployment.until_idle` while clients of this loop go on, say to hang up."""
    await soon(lambda: live.left() == (0, 0), lambda: f"sequences and frames left: {live.left()}")


async def complete(http: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    """One successful completion, greedy unless told otherwise."""
    response = await http.post("/v1/completions", json={"model": "P", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def text_of(http: httpx2.AsyncClient, **body: Any) -> str:
    text: str = (await complete(http, **body))["choices"][0]["text"]
    return text


async def streamed(http: httpx2.AsyncClient, **body: Any) -> tuple[str, list[Any]]:
    """Joined text of a streamed completion, and its events without [DONE]."""
    response = await http.post("/v1/completions", json={"model": "P", "temperature": 0, "stream": True, **body})
    assert response.status_code == 200, response.text
    *pieces, done = events(response.text)
    assert done == "[DONE]"
    assert response.text.count("[DONE]") == 1
    return "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]), pieces


async def refused(http: httpx2.AsyncClient, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """The error of a request that must be a 400, streamed or not."""
    found = {}
    for stream in (False, True):
        response = await http.post(path, json={"model": "P", **body, "stream": stream})
        assert response.status_code == 400, response.text
        found = response.json()["error"]
    return found
