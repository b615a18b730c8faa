"""Numbers: /metrics for Prometheus, /stats as JSON for `crosspool ps` and `crosspool top`, /version.

/stats/stream says what /stats says again and again, as server-sent events, with the steps that ended since.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import State
from starlette.responses import PlainTextResponse, Response

from crosspool import __version__
from crosspool.errors import CrossPoolError
from crosspool.server.errors import ErrorBody
from crosspool.server.health import health_of, judge_model, judge_workers
from crosspool.server.models_routes import ERRORS, model_cards
from crosspool.server.stream import EventStream

router = APIRouter(tags=["numbers"])
GUARDED: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "events until the end"},
    400: {"model": ErrorBody, "description": "the interval is out of range"},
    **GUARDED,
}

MAX_STEPS = 600  # of one event: the newest ones
LOOK_S = 0.25  # how soon a stream notices that the engine has ended


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse, responses=GUARDED)
async def metrics(request: Request) -> Response:
    state = request.app.state
    state.metrics.tasks.set(len(asyncio.all_tasks()))
    text = generate_latest(state.metrics.registry)
    if state.vllm_metrics is not None:
        text += generate_latest(state.vllm_metrics)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/stats", summary="Both pools, lanes, queues and models at this moment", responses=GUARDED)
async def stats(request: Request) -> dict[str, Any]:
    return moment(request.app.state)


def moment(state: State) -> dict[str, Any]:
    """Everything the server knows about the present moment, as JSON."""
    snapshot, models = state.engine.stats(), state.engine.models()
    return {
        "schema_version": 1,
        "version": __version__,
        "health": health_of(state.engine).body(),
        "model_health": {info.name: judge_model(info, snapshot).body() for info in models},
        "worker_health": {rank: found.body() for rank, found in judge_workers(models, snapshot).items()},
        "draining": state.draining,
        "cards": model_cards(state),
        "tbt_s": state.metrics.recent_tbt(),
        "ttft_s": state.metrics.recent_ttft(),
        **asdict(snapshot),
    }


@router.get("/version", summary="The version of this server", responses=GUARDED)
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/stats/stream", summary="/stats as events, with the lanes' steps", responses=STREAMED, response_model=None)
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
