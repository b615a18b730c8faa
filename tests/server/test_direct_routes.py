"""Routes called straight: the same answers as over the framework's way, which all that is not plain still takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from crosspool.server import generation_routes, messages_routes, responses_routes, token_routes
from crosspool.server.direct_routes import DirectRoutes, direct_routes
from crosspool.server.errors import APIError
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixtures import connect, fake_app

PLAIN = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
JSON = b"application/json"
ODD_BODIES: list[tuple[bytes, dict[str, str]]] = [
    (b"", {}),
    (b"{", {}),
    (b"[]", {}),
    (b'"text"', {}),
    (b"\xff\xfe{}", {}),
    (b"[" * 100_000, {}),
    (json.dumps({**PLAIN, "temperature": 9}).encode(), {}),
    (json.dumps({**PLAIN, "prompt": "\ud83d"}).encode(), {}),
    (json.dumps({"model": "tiny"}).encode(), {}),
    (json.dumps(PLAIN).encode(), {"Content-Type": "text/plain"}),
    (json.dumps(PLAIN).encode(), {"Content-Type": "application/vnd.api+json"}),
    (json.dumps({**PLAIN, "model": "nobody"}).encode(), {}),
    (json.dumps({**PLAIN, "max_tokens": 10**9}).encode(), {}),
    (json.dumps(PLAIN).encode(), {"X-Request-Timeout": "soon"}),
    (json.dumps(PLAIN).encode(), {}),
]


def test_every_route_that_generates_is_direct_and_no_other() -> None:
    found = direct_routes([module.router for module in (generation_routes, messages_routes, responses_routes)])
    assert set(found) == {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
    assert direct_routes([token_routes.router]) == {}


@pytest.mark.parametrize(("body", "headers"), ODD_BODIES)
async def test_both_ways_answer_alike(
    body: bytes, headers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for ways in ("direct", "framework"):
        if ways == "framework":
            monkeypatch.setattr("crosspool.server.app.direct_routes", lambda routers: {})
        async with connect(fake_app(FakeEngine(("tiny", "other")), tmp_path)) as http:
            sent = {"Content-Type": "application/json", **headers}
            response = await http.post("/v1/completions", content=body, headers=sent)
            answers.append((response.status_code, _without_ids(response.json()), _kept(response)))
    assert answers[0] == answers[1]


def _without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def _kept(response: httpx2.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in ("x-request-id", "date")}


class Framework:
    """The application behind: keeps the bodies that come to it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append(await Request(scope, receive).body())
        await JSONResponse({"way": "framework"})(scope, receive, send)


async def ask(
    messages: list[Message], handler: Callable[..., Any] | None = None, **scope: Any
) -> tuple[Framework, list[Message]]:
    """What one POST /v1/completions comes to: the application behind, and what is sent."""
    behind, sent, left = Framework(), [], list(messages)
    routes = direct_routes([generation_routes.router])
    handlers = {} if handler is None else {APIError: handler}
    found = DirectRoutes(behind, routes, handlers)

    async def receive() -> Message:
        return left.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asked = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-type", JSON)]}
    await found({**asked, **scope}, receive, send)
    return behind, sent


async def test_a_refused_body_comes_to_the_framework_whole() -> None:
    parts = [b'{"model": "tiny",', b' "prompt"', b": 7}"]
    messages = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]
    behind, sent = await ask(messages)
    assert behind.bodies == [b"".join(parts)]
    assert sent[0]["status"] == 200


@pytest.mark.parametrize("scope", [{"path": "/v1/models"}, {"headers": [(b"content-type", b"text/plain")]}])
async def test_what_is_not_plain_is_not_read(scope: dict[str, Any]) -> None:
    behind, _ = await ask([{"type": "http.request", "body": json.dumps(PLAIN).encode()}], **scope)
    assert len(behind.bodies) == 1


async def test_an_error_without_a_handler_or_after_the_start_is_raised() -> None:
    class App:
        """Where a request's `app` has its state."""

        class state:
            draining = True

    message = {"type": "http.request", "body": json.dumps(PLAIN).encode()}
    with pytest.raises(APIError, match="shutting down"):
        await ask([message], app=App)

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"told": str(error)}, 418)

    behind, sent = await ask([message], handle, app=App)
    assert (behind.bodies, sent[0]["status"]) == ([], 418)
