"""200 requests at once over three models, with random lengths, parameters, shapes and disconnects."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx2
import psutil

from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.awaited import soon
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.server_fixtures import events
from tests.support.tiny_models import write_tiny_model
from tests.support.user_case_client import until_idle

FAMILIES = {"a": "qwen3_moe", "b": "deepseek_v2", "c": "glm4_moe_lite"}
LEFT = "left"


async def test_200_requests_at_once_end_rightly_and_leave_nothing(tmp_path: Path) -> None:
    config = DeploymentConfig(
        models=tuple(
            ModelConfig(source=str(write_tiny_model(tmp_path / name, family, num_layers=2)), page_tokens=16)
            for name, family in FAMILIES.items()
        ),
        pools=PoolsConfig(layout="inprocess", kv_pool_bytes=8 * MiB, frame_bytes=64 * KiB),
        scheduling=SchedulingConfig(max_queue=100, max_num_seqs=8),
    )
    draw = random.Random(7)
    requests = [_request(draw) for _ in range(200)]
    with live_deployment(config) as live:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=live.url, timeout=60, limits=limits) as http:
            outcomes = await asyncio.gather(*(_send(http, *request) for request in requests))
            again = [request for request in requests if request[1] is None and "seed" in request[0]][:5]
            for body, leave_after in again:  # the same seed alone gives the text it gave in company
                assert await _send(http, body, leave_after) == outcomes[requests.index((body, leave_after))]
        await until_idle(live)
        (pool,) = live.stats().pools
        assert pool.frames_free + pool.frames_reusable == pool.frames_budget
        loads = live.stats().models
        assert sum(load.num_queued + load.num_prefilling + load.num_decoding + load.num_parked for load in loads) == 0
        assert sum(sum(load.num_finished.values()) for load in loads) == sum(load.num_accepted for load in loads)
        await soon(lambda: not _open_sockets(live), lambda: _open_sockets(live))
    assert outcomes.count(LEFT) >= 20
    assert len([outcome for outcome in outcomes if outcome != LEFT]) >= 100


def _open_sockets(live: LiveDeployment) -> list[Any]:
    """The server's ends of connections."""
    port = int(live.url.rsplit(":", 1)[1])
    return [
        found
        for found in psutil.Process().net_connections("tcp")
        if found.laddr.port == port and found.status == psutil.CONN_ESTABLISHED
    ]


def _request(draw: random.Random) -> tuple[dict[str, Any], float | None]:
    """A body and, for a fourth of them, the seconds after which the client leaves."""
    body: dict[str, Any] = {
        "model": draw.choice(list(FAMILIES)),
        "prompt": [draw.randrange(5, 260) for _ in range(draw.randrange(1, 120))],
        "max_tokens": draw.randrange(1, 60),
        "stream": draw.random() < 0.6,
        "n": draw.choice((1, 1, 1, 2)),
        "ignore_eos": draw.random() < 0.7,
        "temperature": draw.choice((0, 0.7, 1.2)),
    }
    options = {"seed": draw.randrange(1000), "top_p": 0.9, "top_k": 20, "min_p": 0.05, "presence_penalty": 1}
    options |= {
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logprobs": 2,
        "stop": ["zz"],
        "logit_bias": {"40": 3},
    }
    body |= {name: value for name, value in options.items() if draw.random() < 0.4}
    return body, draw.uniform(0.01, 0.6) if draw.random() < 0.25 else None


async def _send(http: httpx2.AsyncClient, body: dict[str, Any], leave_after: float | None) -> Any:
    """The texts by choice, checked for their form; LEFT for a client that did not stay."""
    try:
        async with asyncio.timeout(leave_after):
            response = await http.post("/v1/completions", json=body)
    except TimeoutError:
        return LEFT
    assert response.status_code == 200, response.text
    if body["stream"]:
        *pieces, done = events(response.text)
        assert done == "[DONE]"
        choices = [piece["choices"][0] for piece in pieces]
        ends = [choice for choice in choices if choice["finish_reason"]]
    else:
        choices = ends = response.json()["choices"]
        assert response.json()["usage"]["completion_tokens"] <= body["n"] * body["max_tokens"]
    assert sorted(choice["index"] for choice in ends) == list(range(body["n"]))
    assert {choice["finish_reason"] for choice in ends} <= {"stop", "length"}
    texts = [""] * body["n"]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    return texts
