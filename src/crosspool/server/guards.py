"""What every request passes before a route: its id and log line, the key, the size of its body. Plain ASGI.

Class-based response middleware would stand between a route and the client's disconnect, so none is used.
"""

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosspool.server.errors import APIError

access_log = logging.getLogger("crosspool.access")

OPEN_PATHS = frozenset({"/", "/ui", "/health", "/health/ready"})
OPEN_PREFIXES = ("/ui/", "/health/")  # the page holds no data: what it shows comes from guarded routes
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestContext:
    """Gives each request an id (the client's X-Request-Id where it sends a sound one), echoes it, logs one line."""

    def __init__(self, app: ASGIApp, quiet_paths: Sequence[str] = ()) -> None:
        self._app = app
        self._quiet_paths = frozenset(quiet_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else f"req-{uuid.uuid4().hex}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if scope["path"] not in self._quiet_paths:
                access_log.info(
                    "%s %s %s %.1f ms id=%s model=%s",
                    scope["method"],
                    ascii(scope["path"])[1:-1],
                    status or "left",
                    1000 * (time.perf_counter() - started),
                    request_id,
                    state.get("model", "-"),
                )


class ApiKeyGuard:
    """Lets in requests that carry one of the keys, as a bearer token. Health routes and CORS preflights are open."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_guarded(scope) and not self._is_known(Headers(scope=scope)):
            error = APIError(
                401,
                "the API key is missing or unknown; send one as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_guarded(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        is_open = path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)
        return bool(self._digests) and scope["method"] != "OPTIONS" and not is_open

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them: constant time
        return any(matches)


class BodyLimit:
    """Refuses bodies above a number of bytes with 413, by their declared length or while they arrive."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            error = self._too_large()
            await JSONResponse(error.body(), error.status, {"Connection": "close"})(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, self._too_large().message)  # the one exception FastAPI lets through here
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> APIError:
        return APIError(
            413, f"the body is larger than the limit of {self._max_body_bytes} bytes", code="request_too_large"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
