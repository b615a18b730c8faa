"""Liveness and readiness, judged by forward progress rather than by a process that answers.

`idle`: no work. `busy`: work, and steps end. `recovering`: a worker is being restarted. `stuck`: work in flight and no
step has ended, or a worker has been down, for STUCK_AFTER_S. `stopped`: the engine itself no longer runs.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from crosspool.engine.stats import EngineStats, ModelInfo
from crosspool.errors import CrossPoolError
from crosspool.server.engine_client import EngineClient

STUCK_AFTER_S = 30.0

router = APIRouter(tags=["health"])


@dataclass(frozen=True, slots=True)
class Health:
    """One word for the engine's state, and since when (seconds ago) what it names has lasted."""

    state: str
    for_s: float | None = None
    detail: str | None = None

    @property
    def is_live(self) -> bool:
        return self.state in ("idle", "busy", "recovering")

    def body(self) -> dict[str, Any]:
        given = {"status": self.state, "for_s": self.for_s, "detail": self.detail}
        return {key: value for key, value in given.items() if value is not None}


def health_of(engine: EngineClient) -> Health:
    """The engine's state now."""
    try:
        engine.check()
    except CrossPoolError as error:
        return Health("stopped", detail=str(error))
    return judge(engine.stats())


def judge(stats: EngineStats) -> Health:
    """The state of a running engine at the moment of the snapshot."""
    if stats.ranks_down:
        rank, since = min(stats.ranks_down.items(), key=lambda item: item[1])
        down_s = stats.now_s - since
        state = "stuck" if down_s > STUCK_AFTER_S else "recovering"
        return Health(state, round(down_s, 3), f"worker {rank} is down")
    if stats.busy_since_s is not None:
        silent_s = stats.now_s - stats.busy_since_s
        if silent_s > STUCK_AFTER_S:
            return Health("stuck", round(silent_s, 3), "no step has ended though work is in flight")
        return Health("busy", round(silent_s, 3))
    return Health("idle")


def not_ready(models: list[ModelInfo]) -> str | None:
    """Why requests cannot be served yet: a model that still loads, or none that is ready."""
    loading = [model.name for model in models if model.state == "loading"]
    if loading:
        return f"loading {', '.join(loading)}"
    if not any(model.state == "ready" for model in models):
        return "no model is ready"
    return None


UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"description": "not healthy; the body says why and since when"}}


@router.get("/health", summary="Liveness: is there forward progress?", responses=UNHEALTHY)
async def health(request: Request) -> JSONResponse:
    found = health_of(request.app.state.engine)
    return JSONResponse(found.body(), 200 if found.is_live else 503)


@router.get("/health/ready", summary="Readiness: may traffic be sent here?", responses=UNHEALTHY)
async def ready(request: Request) -> JSONResponse:
    state = request.app.state
    if state.draining:
        return JSONResponse({"status": "draining"}, 503)
    found = health_of(state.engine)
    reason = not_ready(state.engine.models())
    if found.is_live and reason is not None:
        return JSONResponse({"status": "loading", "detail": reason}, 503)
    return JSONResponse(found.body(), 200 if found.is_live else 503)
