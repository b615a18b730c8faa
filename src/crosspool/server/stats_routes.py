"""Numbers: /metrics for Prometheus, /stats as JSON for `crosspool ps` and `crosspool top`, /version."""

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import State
from starlette.responses import PlainTextResponse, Response

from crosspool import __version__
from crosspool.server.health import health_of, judge_model, judge_workers
from crosspool.server.models_routes import ERRORS, model_cards

router = APIRouter(tags=["numbers"])
GUARDED: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}


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
