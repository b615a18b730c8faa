"""What every request passes before a route: its id and log line, the size of headers and body. Plain ASGI.

Class-based response middleware would stand between a route and the client's disconnect, so none is used.
"""

import logging
import re
import time
import uuid
from collections.abc import Sequence

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosspool.server.context import CURRENT
from crosspool.server.errors import APIError
from crosspool.server.garbage import Garbage

access_log = logging.getLogger("crosspool.access")

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestContext:
    """Gives each request an id (the client's X-Request-Id where it sends a sound one), echoes it, logs one line."""

    def __init__(self, app: ASGIApp, quiet_paths: Sequence[str] = ()) -> None:
        self._app = app
        self._quiet_paths = frozenset(quiet_paths)
        self._garbage = Garbage()

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

        token = CURRENT.set(state)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if scope["path"] not in self._quiet_paths:
                self._log(scope, status, 1000 * (time.perf_counter() - started))
            CURRENT.reset(token)
            self._garbage.request_ended()

    def _log(self, scope: Scope, status: int, duration_ms: float) -> None:
        state, path = scope["state"], ascii(scope["path"])[1:-1]
        access_log.info(
            "%s %s %s %.1f ms id=%s model=%s",
            scope["method"],
            path,
            status or "left",
            duration_ms,
            state["request_id"],
            state.get("model", "-"),
            extra={
                "method": scope["method"],
                "path": path,
                "status": status or None,
                "duration_ms": round(duration_ms, 1),
            },
        )


class HeaderLimit:
    """Refuses requests whose headers are above a number of bytes with 431."""

    def __init__(self, app: ASGIApp, max_header_bytes: int) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and sum(len(k) + len(v) + 4 for k, v in scope["headers"]) > self._max_header_bytes:
            error = APIError(
                431, f"the headers are larger than {self._max_header_bytes} bytes", code="request_headers_too_large"
            )
            await JSONResponse(error.body(), error.status, {"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


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
