"""Server-sent events, and clients that leave.

A stream is: pieces; with include_usage one piece without choices that holds the totals; `[DONE]`. After a failure: one
event with the error; `[DONE]`. `[DONE]` comes exactly once on every path. While nothing is generated, at the start or
while a lost worker comes back, comment lines at an interval keep proxies from cutting the connection.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from crosspool.engine.output import RequestOutput
from crosspool.server.choices import AnswerShape, Json, usage_json
from crosspool.server.errors import APIError
from crosspool.server.outputs import OutputGroup

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting for a token\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeft(Exception):
    """The client closed the connection before its answer was ready; nobody is there to read one."""


class EventStream(Response):
    """Sends events as they come. When the client leaves, the events are closed at once, even while waiting for one.

    What the events raise before the first of them is raised to the caller, so that it can still be a plain status.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientLeft):
            await race(self._send(send), partial(left, receive))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, b"")
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer_events(
    group: OutputGroup, shape: AnswerShape, head: Json, *, usage: bool, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """The events of one answer; `head` is what every piece repeats.

    A failure before the first token and within `keep_alive_s` is raised, a later one is an event. Closes the group
    however it ends, a client that leaves included.
    """
    opened: set[int] = set()
    lasts: dict[int, RequestOutput] = {}
    if usage:
        head = {**head, "usage": None}
    start = b"data: " + _encode(head)[:-1] + b',"choices":['  # the same in every piece, so written once
    try:
        batch = await group.next(timeout_s=keep_alive_s)
        try:
            while batch is not None:
                events: list[bytes] = []
                for index, output in batch:
                    choices = [shape.piece(index, output)]
                    if index not in opened:
                        opened.add(index)
                        choices.insert(0, shape.opening(index))
                    events += [start + _encode(choice) + b"]}\n\n" for choice in choices if choice is not None]
                    lasts[index] = output
                if events:
                    yield b"".join(events)
                elif not batch:
                    yield KEEP_ALIVE
                batch = await group.next(timeout_s=keep_alive_s)
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
    return await race(work, partial(left, request.receive))


async def race(work: Coroutine[Any, Any, T], make_alarm: Callable[[], Coroutine[Any, Any, None]]) -> T:
    """The result of `work`; when the alarm raises first, `work` is cancelled and the alarm raised. No task is left.

    `work` runs in the caller's task, and the alarm is made only once `work` waits for something: one that never waits
    costs no turn of the event loop. NOTE: the caller's task is cancelled to end `work`, as `asyncio.timeout` does.
    """
    worker = asyncio.current_task()
    assert worker is not None, "a coroutine runs in a task"
    watch: asyncio.Task[None] | None = None
    has_ended = has_rung = False

    def start() -> None:
        nonlocal watch
        watch = asyncio.create_task(make_alarm(), name="alarm")
        watch.add_done_callback(ring)

    def ring(_: asyncio.Task[None]) -> None:
        nonlocal has_rung
        if not has_ended:  # it may end in the very turn of the loop in which the alarm raises
            has_rung = worker.cancel()

    starting = asyncio.get_running_loop().call_soon(start)
    try:
        return await work
    except asyncio.CancelledError:
        if watch is not None and has_rung and worker.cancelling() == 1:
            watch.result()
        raise
    finally:
        has_ended = True
        if has_rung:
            worker.uncancel()
        starting.cancel()
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


async def left(receive: Receive) -> None:
    """Raise ClientLeft once the client has closed the connection; a body that is too large is nothing that is read."""
    while True:
        with suppress(HTTPException):
            if (await receive())["type"] == "http.disconnect":
                raise ClientLeft


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def event(body: Json) -> bytes:
    """An event that has the name of its body's `type`."""
    return f"event: {body['type']}\n".encode() + _data(body)


def _encode(value: Json) -> bytes:
    return _ENCODER.encode(value).encode()


def _data(body: Json) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"
