"""Who may use the server: API keys for its routes, admin keys for /admin. Plain ASGI."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from crosspool.server.errors import APIError

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
            await JSONResponse(refusal.body(), refusal.status, refusal.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> APIError | None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
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
