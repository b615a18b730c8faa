"""Liveness and readiness, judged by forward progress rather than by a process that answers.

`idle`: no work. `busy`: work, and steps end. `recovering`: a worker is being restarted. `stuck`: work in flight and no
step has ended for STUCK_AFTER_S, or a worker has been down for longer than that and than requests wait for it, or is
not started again. Workers count that some model cannot answer without: not one of several KV ranks that have KV of
their own. `stopped`: the engine itself no longer runs. A model may also be `loading`, `draining` or `failed`, and so
may not be asked; the engine is live all the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from crosspool.engine.stats import EngineStats, ModelInfo
from crosspool.errors import CrossPoolError
from crosspool.server.engine_client import EngineClient, info_of
from crosspool.server.errors import ErrorBody

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
    stats, models = engine.stats(), engine.models()
    if stats.ranks_down:
        missed = {rank for info in models for rank in missed_ranks(info, stats)}
        spare = {rank for info in models for rank in (*info.ranks, *info.prefill_ranks)} - missed
        down = {rank: since for rank, since in stats.ranks_down.items() if rank not in spare}
        stats = replace(stats, ranks_down=down)
    return judge(stats)


def missed_ranks(info: ModelInfo, stats: EngineStats) -> dict[str, float]:
    """Ranks that keep the model from answering, and since when: none while one of its homes has all that it needs.

    Else those of the home that requests wait for longest. Without a prefill rank its prompts run in the pools.
    """

    def patience(down: dict[str, float]) -> tuple[bool, float]:
        return not down.keys() & stats.ranks_given_up.keys(), min(down.values())

    by_home = [
        {
            rank: stats.ranks_down[rank]
            for rank in ranks
            if rank in stats.ranks_down and info.name not in stats.held_again.get(rank, ())
        }
        for ranks in info.homes
    ]
    return max(by_home, key=patience) if all(by_home) else {}


def judge(stats: EngineStats) -> Health:
    """The state of a running engine at the moment of the snapshot."""
    if stats.ranks_down:
        given_up = [rank for rank in stats.ranks_down if rank in stats.ranks_given_up]
        rank = min(given_up or stats.ranks_down, key=stats.ranks_down.__getitem__)
        down_s = stats.now_s - stats.ranks_down[rank]
        if given_up:
            return Health("stuck", round(down_s, 3), stats.ranks_given_up[rank])
        state = "stuck" if down_s > max(STUCK_AFTER_S, stats.recovery_timeout_s) else "recovering"
        return Health(state, round(down_s, 3), f"worker {rank} is down")
    if stats.busy_since_s is not None:
        return _progress(stats.now_s, stats.busy_since_s, "no step has ended though work is in flight")
    return Health("idle")


def judge_model(info: ModelInfo, stats: EngineStats) -> Health:
    """The state of one model: of its ranks, then of its own steps. A model whose requests only queue is busy."""
    if info.state != "ready":
        return Health(info.state, detail=info.error)
    if missed := missed_ranks(info, stats):
        return judge(replace(stats, ranks_down=missed))
    load = next((load for load in stats.models if load.name == info.name), None)
    if load is None or not (load.num_queued or load.num_prefilling or load.num_decoding or load.num_parked):
        return Health("idle")
    return _progress(stats.now_s, load.busy_since_s, "no step of this model has ended though it has requests")


def judge_workers(models: Sequence[ModelInfo], stats: EngineStats) -> dict[str, Health]:
    """The state of every rank. A rank is as busy, or as stuck, as the step that has been longest in flight on it."""
    ranks_of = {info.name: (*info.ranks, *info.prefill_ranks) for info in models}
    prefill_ranks = {rank for info in models for rank in info.prefill_ranks}
    found: dict[str, Health] = {}
    for rank in dict.fromkeys(rank for ranks in ranks_of.values() for rank in ranks):
        if rank in stats.ranks_down:
            found[rank] = judge(replace(stats, ranks_down={rank: stats.ranks_down[rank]}))
            continue
        since = [
            lane.since_s
            for lane in stats.lanes
            if lane.model is not None
            and lane.since_s is not None
            and rank in ranks_of.get(lane.model, ())
            and (lane.phase == "prefill" or rank not in prefill_ranks)
        ]
        loading = [info.name for info in models if info.state == "loading" and rank in ranks_of[info.name]]
        if since:
            found[rank] = _progress(stats.now_s, min(since), "a step has been in flight too long")
        else:
            found[rank] = Health("loading", detail=", ".join(loading)) if loading else Health("idle")
    return found


def _progress(now_s: float, since_s: float | None, what: str) -> Health:
    if since_s is None:
        return Health("busy")
    silent_s = now_s - since_s
    if silent_s > STUCK_AFTER_S:
        return Health("stuck", round(silent_s, 3), what)
    return Health("busy", round(silent_s, 3))


def not_ready(models: Sequence[ModelInfo], awaited: Collection[str]) -> str | None:
    """Why requests cannot be served yet: a model of the start that still loads, or none that is ready.

    A model that is loaded later keeps no traffic from the others.
    """
    known = {model.name for model in models}
    loading = [model.name for model in models if model.state == "loading" and model.name in awaited]
    loading += sorted(name for name in awaited if name not in known)
    if loading:
        return f"loading {', '.join(loading)}"
    if not any(model.state == "ready" for model in models):
        return "no model is ready"
    return None


UNHEALTHY_MODEL: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorBody, "description": "no model of that name is served"},
    503: {"description": "the model loads, drains, failed or is stuck; the body says which"},
}
UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"description": "not healthy; the body says why and since when"}}


@router.get("/health", summary="Liveness: is there forward progress?", responses=UNHEALTHY)
async def health(request: Request) -> JSONResponse:
    engine = request.app.state.engine
    found = health_of(engine)
    stats, models = engine.stats(), engine.models()
    body = {
        **found.body(),
        "models": {info.name: judge_model(info, stats).body() for info in models},
        "workers": {rank: state.body() for rank, state in judge_workers(models, stats).items()},
    }
    return JSONResponse(body, 200 if found.is_live else 503)


@router.get("/health/models/{name:path}", summary="One model: may it be asked?", responses=UNHEALTHY_MODEL)
async def model_health(name: str, request: Request) -> JSONResponse:
    """200 while the model is ready and makes progress; by name or alias."""
    state = request.app.state
    info = info_of(state.engine, state.catalogue.resolve(name).name)
    found = health_of(state.engine)
    if found.state != "stopped":
        found = judge_model(info, state.engine.stats())
    return JSONResponse(found.body(), 200 if found.is_live else 503)


@router.get("/health/ready", summary="Readiness: may traffic be sent here?", responses=UNHEALTHY)
async def ready(request: Request) -> JSONResponse:
    state = request.app.state
    if state.draining:
        return JSONResponse({"status": "draining"}, 503)
    found = health_of(state.engine)
    reason = not_ready(state.engine.models(), state.awaited)
    if found.is_live and reason is not None:
        return JSONResponse({"status": "loading", "detail": reason}, 503)
    return JSONResponse(found.body(), 200 if found.is_live else 503)
