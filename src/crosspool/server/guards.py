"""What every request passes before a route: its id and log line, the size of headers and body, its API key. Plain ASGI.

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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosspool.server.context import CURRENT, route_path
from crosspool.server.errors import MESSAGES_PATH, APIError, error_response
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
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if route_path(scope).startswith(MESSAGES_PATH):
                    headers["Request-Id"] = request_id  # where Anthropic's clients look
            await send(message)

        token = CURRENT.set(state)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if route_path(scope) not in self._quiet_paths:
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
            message = f"the headers are larger than {self._max_header_bytes} bytes"
            error = APIError(431, message, code="request_headers_too_large", headers={"Connection": "close"})
            await error_response(error, scope)(scope, receive, send)
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
            await error_response(self._too_large(), scope)(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if message["type"] == "http.request" and received > self._max_body_bytes:
                raise HTTPException(413, self._too_large().message)  # the one exception FastAPI lets through here
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> APIError:
        message = f"the body is larger than the limit of {self._max_body_bytes} bytes"
        return APIError(413, message, code="request_too_large")


OPEN_PATHS = frozenset({"/", "/docs", "/ui", "/health", "/health/ready"})
OPEN_PREFIXES = ("/ui/", "/health/")  # the page holds no data: what it shows comes from guarded routes
ADMIN_PREFIX = "/admin/"


class KeyGuard:
    """Lets in requests that carry one of the keys, as a bearer token. Health and the page are open, and CORS
    preflights are answered before they come here.

    With no API key everything but /admin is open; with no admin key /admin is closed. An admin key opens everything.
    Keys are kept as digests and compared in constant time. Which key came is `state["key"]`, as a short name.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = (), admin_api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._has_keys = bool(api_keys)
        self._has_admin_keys = bool(admin_api_keys)
        self._known = [(_digest(key), f"key{index}", False) for index, key in enumerate(api_keys, 1)]
        self._known += [(_digest(key), f"admin{index}", True) for index, key in enumerate(admin_api_keys, 1)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> APIError | None:
        path = route_path(scope) or "/"
        if not path.startswith("/"):  # the router takes the prefix with it, and may find an admin route then
            return APIError(404, "a path begins with /; GET /openapi.json lists the routes", code="not_found")
        name, is_admin = self._bearer(Headers(scope=scope))
        if name is not None:
            scope.setdefault("state", {})["key"] = name
        if path.startswith(ADMIN_PREFIX):
            if not self._has_admin_keys:
                return APIError(
                    403, "admin routes are closed; start the server with --admin-api-key", code="admin_closed"
                )
            return None if is_admin else _unauthorized("the admin API key is missing or unknown")
        if not self._has_keys or name is not None or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return None
        return _unauthorized("the API key is missing or unknown")

    def _bearer(self, headers: Headers) -> tuple[str | None, bool]:
        """Name of the key and whether it is an admin's; (None, False) without a known one."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # where Anthropic's clients put it
        if not key:
            return None, False
        digest = _digest(key.strip())
        found: tuple[str | None, bool] = (None, False)
        for known, name, is_admin in self._known:  # all of them: constant time
            if hmac.compare_digest(digest, known):
                found = (name, is_admin)
        return found


def _unauthorized(message: str) -> APIError:
    return APIError(
        401,
        f"{message}; send one as `Authorization: Bearer KEY`",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
