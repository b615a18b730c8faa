"""What clients of a soak ask: whole answers, streams that are read or left, chats, bad bodies, metrics.

Each returns the HTTP status, or LEFT where the client left.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import httpx2

FORMS = (
    None,
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 2]}}},
)
LEFT = -1  # stands for a status where the client left

BAD_BODIES: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"model": "nobody", "prompt": "x"}',
    b'{"model": "austen", "prompt": []}',
    b'{"model": "holmes", "prompt": "x", "temperature": -3}',
    b'{"model": "holmes", "prompt": "x", "max_tokens": 1000000}',
    b'{"model": "austen", "prompt": "x", "logit_bias": {"99999999": 1}}',
    b'{"model": "shakespeare", "prompt": "\\ud83e", "stop": [""]}',
    b'{"model": "austen", "prompt": "' + b"too long " * 100_000 + b'"}',
)


async def _whole(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    return (await http.post("/v1/completions", json=body)).status_code


async def _stream(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    asked = {**body, "stream": True, "n": draw.choice((1, 1, 3)), "stop": draw.choice((None, [" the"]))}
    async with http.stream("POST", "/v1/completions", json=asked) as response:
        text = (await response.aread()).decode()
    if response.status_code == 200 and text.count("data: [DONE]") != 1:
        raise AssertionError(f"a stream without its one [DONE]: {text[-300:]}")
    return response.status_code


async def _leave_stream(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    async with http.stream("POST", "/v1/completions", json={**body, "max_tokens": 500, "stream": True}) as response:
        if response.status_code != 200:
            return response.status_code
        async for line in response.aiter_lines():
            if line and draw.random() < 0.2:
                break
    return LEFT


async def _leave_whole(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    try:
        async with asyncio.timeout(draw.uniform(0.0, 0.5)):
            return await _whole(http, {**body, "max_tokens": 500}, draw)
    except TimeoutError:
        return LEFT


async def _bad(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    path = draw.choice(("/v1/completions", "/v1/chat/completions"))
    content = draw.choice(BAD_BODIES)
    response = await http.post(path, content=content, headers={"Content-Type": "application/json"})
    if response.status_code not in (400, 404):
        raise AssertionError(f"{content[:200]!r} got {response.status_code}: {response.text[:300]}")
    return response.status_code


async def _look(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    path = draw.choice(("/health", "/metrics", "/v1/models", "/ui/", "/stats/stream?interval=0.2"))
    async with http.stream("GET", path) as response:
        async for _ in response.aiter_bytes():
            if re.search("stream", path):
                break
    return response.status_code


async def _chat(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    """A conversation in one of the three APIs, some of them in a grammar; a stream is read or left."""
    said = [{"role": "user", "content": body["prompt"]}]
    basic = {"model": body["model"], "stream": draw.random() < 0.5}
    path, asked = draw.choice(
        (
            ("/v1/chat/completions", {"messages": said, "max_tokens": 24, "response_format": draw.choice(FORMS)}),
            ("/v1/messages", {"messages": said, "max_tokens": 24}),
            ("/v1/responses", {"input": said, "max_output_tokens": 24}),
        )
    )
    async with http.stream("POST", path, json={**basic, **asked}) as response:
        if draw.random() < 0.3:
            return LEFT
        await response.aread()
    return response.status_code


ACTIONS = (_whole, _stream, _leave_stream, _leave_whole, _bad, _look, _chat)
