"""What clients of a soak ask at the edges: ids, forms, log-probabilities, what is refused, connections left half-way.

Each returns the HTTP status, or LEFT where the client left.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2

from benchmarks.served.soak_requests import LEFT
from crosspool.units import MiB

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FORMS = (
    ({"choice": ["yes", "no"]}, "yes|no"),
    ({"regex": "[0-9]{4}"}, "[0-9]{4}"),
    ({"json": {"enum": [1, 2]}}, "[12]"),
)
TOO_LARGE = 9 * MiB


async def _tokens(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    """A text is the same after its ids."""
    asked = {"model": body["model"], "prompt": body["prompt"], "add_special_tokens": False}
    ids = (await http.post("/tokenize", json=asked)).json()["tokens"]
    back = await http.post("/detokenize", json={"model": body["model"], "tokens": ids})
    assert back.json()["prompt"] == body["prompt"], back.text
    return back.status_code


async def _structured(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    """Answers in a choice, an expression or a grammar are what was asked for."""
    form, pattern = draw.choice(FORMS)
    asked = {"model": body["model"], "prompt": body["prompt"], "max_tokens": 48, "structured_outputs": form}
    response = await http.post("/v1/completions", json={**asked, "n": draw.choice((1, 2))})
    if response.status_code == 200:
        texts = [choice["text"] for choice in response.json()["choices"]]
        assert all(re.fullmatch(pattern, text) for text in texts), f"{form}: {texts}"
    return response.status_code


async def _logprobs(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    """Tokens in the answer are those of the usage."""
    response = await http.post("/v1/completions", json={**body, "logprobs": 5, "n": draw.choice((1, 3))})
    if response.status_code == 200:
        answer = response.json()
        told = sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"])
        assert told == answer["usage"]["completion_tokens"], answer["usage"]
    return response.status_code


async def _refused(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    """What is not offered, or not by these models' templates, is said to be."""
    said = [{"role": "user", "content": [IMAGE]}]
    path, asked, status = draw.choice(
        (
            ("/v1/embeddings", {"model": body["model"], "input": body["prompt"]}, 501),
            ("/v1/chat/completions", {"model": body["model"], "messages": said}, 400),
            ("/v1/completions", {**body, "echo": True}, 400),
            ("/v1/chat/completions", {"model": body["model"], "messages": HELLO, "tools": [WEATHER]}, 400),
        )
    )
    response = await http.post(path, json=asked)
    assert response.status_code == status, f"{path}: {response.status_code} {response.text[:300]}"
    return response.status_code


async def _too_large(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    """Refused by its length before it is read, or as it arrives."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(TOO_LARGE // MiB):
            yield b" " * MiB

    if draw.random() < 0.5:
        return (await http.post("/v1/completions", content=pieces())).status_code
    async with _connected(http) as (reader, writer):
        writer.write(_head("1.1", TOO_LARGE))
        return await _status(reader)


async def _old_http(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    """HTTP/1.0: the answer ends with its connection."""
    content = json.dumps({**body, "stream": draw.random() < 0.5}).encode()
    async with _connected(http) as (reader, writer):
        writer.write(_head("1.0", len(content)) + content)
        status = await _status(reader)
        await reader.read()
    return status


async def _half_open(http: httpx2.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    """A part of a request and then nothing; or all of it, and nothing more will be written."""
    content = json.dumps({**body, "max_tokens": 200, "stream": True}).encode()
    whole = _head("1.1", len(content)) + content
    async with _connected(http) as (_, writer):
        if draw.random() < 0.5:
            writer.write(whole[: draw.randrange(len(whole))])
        else:
            writer.write(whole)
            writer.write_eof()
        await asyncio.sleep(draw.uniform(0, 0.5))
    return LEFT


@asynccontextmanager
async def _connected(http: httpx2.AsyncClient) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    where = urlsplit(str(http.base_url))
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def _head(version: str, num_bytes: int) -> bytes:
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {num_bytes}\r\n\r\n".encode()


async def _status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split(maxsplit=2)[1])


EDGES = (_tokens, _structured, _logprobs, _refused, _too_large, _old_http, _half_open)
