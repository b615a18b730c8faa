"""Server-sent events, and clients that leave.

A stream is: pieces; with include_usage one piece without choices that holds the totals; `[DONE]`. After a failure: one
event with the error; `[DONE]`. `[DONE]` comes exactly once on every path. While nothing has been generated yet,
comment lines at an interval keep proxies from cutting the connection.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from crosspool.engine.output import RequestOutput
from crosspool.server.choices import AnswerShape, Json, usage_json
from crosspool.server.errors import APIError
from crosspool.server.outputs import Indexed, OutputGroup

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting for the first token\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeft(Exception):
    """The client closed the connection before its answer was ready; nobody is there to read one."""


class EventStream(Response):
    """Sends events as they come. When the client leaves, the events are closed at once, even while waiting for one."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await race(self._send(send), left(receive))
        except ClientLeft:
            return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer_events(
    group: OutputGroup, first: list[Indexed], shape: AnswerShape, head: Json, *, usage: bool, keep_alive_s: float
) -> AsyncIterator[bytes]:
    """The events of one answer. `first` was taken from the group already; `head` is what every piece repeats.

    Closes the group however it ends, a client that leaves included.
    """
    opened: set[int] = set()
    lasts: dict[int, RequestOutput] = {}
    if usage:
        head = {**head, "usage": None}
    start = b"data: " + _encode(head)[:-1] + b',"choices":['  # the same in every piece, so written once
    try:
        batch: list[Indexed] | None = first
        while batch is not None:
            events: list[bytes] = []
            for index, output in batch:
                choices = [shape.piece(index, output)]
                if index not in opened:
                    opened.add(index)
                    choices.insert(0, shape.opening(index))
                events += [start + _encode(choice) + b"]}\n\n" for choice in choices if choice is not None]
                lasts[index] = output
            if not opened:
                yield KEEP_ALIVE
            elif events:
                yield b"".join(events)
            batch = await group.next(timeout_s=None if opened else keep_alive_s)
        if usage:
            yield _data({**head, "choices": [], "usage": usage_json(by_prompt(lasts, group.num_choices))})
    except APIError as error:
        yield _data(error.body())
    finally:
        await group.close()
    yield DONE


def by_prompt(lasts: dict[int, RequestOutput], num_choices: int) -> list[list[RequestOutput]]:
    """The last outputs of every choice, grouped by prompt."""
    prompts: dict[int, list[RequestOutput]] = {}
    for index in sorted(lasts):
        prompts.setdefault(index // num_choices, []).append(lasts[index])
    return list(prompts.values())


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientLeft then."""
    return await race(work, left(request.receive))


async def race(work: Coroutine[Any, Any, T], alarm: Coroutine[Any, Any, None]) -> T:
    """The result of `work`; when `alarm` raises first, `work` is cancelled and the alarm raised. No task is left."""
    tasks = (asyncio.create_task(work, name="answer"), asyncio.create_task(alarm, name="alarm"))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            tasks[1].result()
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def left(receive: Receive) -> None:
    """Raise ClientLeft once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientLeft


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _encode(value: Json) -> bytes:
    return _ENCODER.encode(value).encode()


def _data(body: Json) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"
