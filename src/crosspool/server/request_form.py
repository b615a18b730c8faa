"""Requests that are written otherwise than the routes, brought to their form. Plain ASGI.

HEAD asks what GET would answer, without the body. A slash at the end of a path means the same as none: a redirect would
lose the body or the key of many a client, and behind a proxy might name an address that nobody can reach.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosspool.server.context import route_path

PAGE = "/ui/"


class RequestForm:
    """Stands right inside the access log, which tells HEAD as it came, and paths as routes and quiet ones are named."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        if path.endswith("/") and len(path) > 1 and path != PAGE:
            scope["path"] = scope.get("root_path", "") + (path.rstrip("/") or "/")
        if scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, _Head(send))
        else:
            await self._app(scope, receive, send)


class _Head:
    """Sends the beginning of an answer and ends it there, so that an endless one ends too."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._send(message)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
