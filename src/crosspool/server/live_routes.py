"""GET /stats/stream: what /stats says, again and again, with the steps that ended since, as server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.datastructures import State
from starlette.responses import Response

from crosspool.errors import CrossPoolError
from crosspool.server.errors import ErrorBody
from crosspool.server.models_routes import ERRORS
from crosspool.server.stats_routes import moment
from crosspool.server.stream import EventStream

MAX_STEPS = 600  # of one event: the newest ones
LOOK_S = 0.25  # how soon a stream notices that the engine has ended

router = APIRouter(tags=["numbers"])

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "events until the end"},
    400: {"model": ErrorBody, "description": "the interval is out of range"},
    401: ERRORS[401],
}


@router.get(
    "/stats/stream", summary="/stats as events, with the lanes' steps", responses=RESPONSES, response_model=None
)
async def stream(request: Request, interval: Annotated[float, Query(ge=0.2, le=60)] = 1.0) -> Response:
    """One event at once and one every `interval` seconds."""
    return EventStream(_events(request.app.state, interval))


async def _events(state: State, interval_s: float) -> AsyncGenerator[bytes, None]:
    since_s = state.engine.stats().now_s - interval_s
    while _is_open(state):
        seen = moment(state)
        steps = state.engine.steps_since(since_s)[-MAX_STEPS:]
        since_s = max(since_s, steps[-1].ended_s if steps else since_s)
        seen["steps"] = [[*span[:4], *(value and round(value, 6) for value in span[4:])] for span in steps]
        yield b"data: " + json.dumps(seen, separators=(",", ":")).encode() + b"\n\n"
        left_s = interval_s
        while left_s > 0 and _is_open(state):
            await asyncio.sleep(min(LOOK_S, left_s))
            left_s -= LOOK_S


def _is_open(state: State) -> bool:
    """Whether the engine still runs: without it there is nothing to tell, and a stream would hold up the end."""
    try:
        state.engine.check()
    except CrossPoolError:
        return False
    return True
