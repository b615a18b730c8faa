"""Prompts far too long: refused by name and number within moments, while the server goes on answering others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from crosspool.server.prompts import MAX_CHARACTERS
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import live_server
from tests.support.server_fixtures import fake_app

WORDS = "the end of all. " * 375_000  # 6 MB
CASES = [
    ("/v1/completions", {"prompt": WORDS}, "prompt"),
    ("/v1/completions", {"prompt": ["fine", WORDS]}, "prompt"),
    ("/v1/completions", {"prompt": [1] * 2_000_000}, "prompt"),
    ("/v1/completions", {"prompt": " " * 6_000_000}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}] * 5000}, "messages"),
    ("/v1/responses", {"input": WORDS}, "input"),
    ("/tokenize", {"prompt": WORDS}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": WORDS}]}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "param"), CASES)
def test_six_megabytes_are_refused_at_once_and_health_answers_meanwhile(
    tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    engine = FakeEngine()

    async def ask(url: str) -> tuple[httpx2.Response, float, float]:
        async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
            await http.get("/health")
            started = time.process_time()  # the server's and the client's work, whatever else the machine does
            asked = asyncio.create_task(http.post(path, json={"model": "tiny", **body}))
            worst_s = 0.0
            while not asked.done():
                before = time.process_time()
                await http.get("/health")
                worst_s = max(worst_s, time.process_time() - before)
            return await asked, time.process_time() - started, worst_s

    with live_server(fake_app(engine, tmp_path)) as url:
        response, cpu_s, worst_s = asyncio.run(ask(url))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    limit = MAX_CHARACTERS if path == "/tokenize" else engine.context_limit
    assert str(limit) in error["message"]
    assert len(error["message"]) < 400
    assert not engine.requests
    assert cpu_s < 5
    assert worst_s < 5  # reading a body of that size is the most of it


async def test_a_prompt_just_below_the_limit_is_answered(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    engine.context_limit = 100_000
    for prompt in ("the end " * 12_000, " " * 99_000):
        response = await http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 2})
        assert response.status_code == 200, response.text[:300]
        assert len(engine.requests[-1].prompt_token_ids) < 100_000
