"""Answers that come before all of their request: what a client still sends is read for a while. Plain ASGI.

A connection that is closed while its client sends is reset, and most clients then never see the answer; one that stays
open would be read for as long as its client sends, or kept for one that does not.
"""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S = 30.0


class Lingering:
    """The outermost: what comes behind an answer is nobody's request. Then the connection is closed.

    Bodies of a declared length up to `max_body_bytes` have an end, and uvicorn reads up to it; their connections stay.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_long(scope):
            await self._app(scope, receive, send)
            return
        has_ended = is_held = False

        async def receive_and_note() -> Message:
            nonlocal has_ended
            message = await receive()
            has_ended = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def send_all_but_the_end(message: Message) -> None:
            nonlocal is_held
            if not has_ended and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Connection"] = "close"
            elif not has_ended and not message.get("more_body", False):
                is_held, message = True, {**message, "more_body": True}
            await send(message)

        await self._app(scope, receive_and_note, send_all_but_the_end)
        if is_held:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while not has_ended:
                        await receive_and_note()
            await send({"type": "http.response.body", "body": b""})

    def _is_long(self, scope: Scope) -> bool:
        """Whether the body has no declared length, or one that is refused."""
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        return "transfer-encoding" in headers or (declared.isdigit() and int(declared) > self._max_body_bytes)
