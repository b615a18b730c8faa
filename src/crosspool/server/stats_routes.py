"""Numbers: /metrics for Prometheus, /stats as JSON for `crosspool ps` and `crosspool top`, /version."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response

from crosspool import __version__
from crosspool.server.health import health_of
from crosspool.server.models_routes import ERRORS, model_card

router = APIRouter(tags=["numbers"])
GUARDED: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse, responses=GUARDED)
async def metrics(request: Request) -> Response:
    text = generate_latest(request.app.state.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/stats", summary="Both pools, lanes, queues and models at this moment", responses=GUARDED)
async def stats(request: Request) -> dict[str, Any]:
    state = request.app.state
    snapshot = state.engine.stats()
    return {
        "schema_version": 1,
        "version": __version__,
        "health": health_of(state.engine).body(),
        "draining": state.draining,
        "cards": [model_card(frontend, state.engine.model(frontend.name)) for frontend in state.catalogue],
        "tbt_s": state.metrics.recent_tbt(),
        **asdict(snapshot),
    }


@router.get("/version", summary="The version of this server", responses=GUARDED)
async def version() -> dict[str, str]:
    return {"version": __version__}
