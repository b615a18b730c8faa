"""The KV pool at run time: its limits, and cached pages given back. Guarded by an admin API key."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.datastructures import State

from crosspool.engine.limit_change import LimitChange
from crosspool.engine.stats import EngineStats, ModelInfo, PoolStats
from crosspool.errors import UnknownModelError
from crosspool.server.admin_routes import ERRORS
from crosspool.server.errors import ErrorBody, bad_request
from crosspool.units import parse_size

router = APIRouter(tags=["admin"])

Size = Annotated[int | str, AfterValidator(parse_size), Field(description="bytes, or a number with KiB, MiB or GiB")]
CHANGES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    400: {"model": ErrorBody, "description": "a field is wrong, or the limits cannot be held; nothing has changed"},
    404: {"model": ErrorBody, "description": "no model of that name is served"},
    503: {"model": ErrorBody, "description": "the model is not ready, or the server shuts down"},
}


class ModelLimitsBody(BaseModel):
    """New limits of one model; a field that is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")

    floor: Size | None = Field(None, description="kept for the model whatever others ask for; null or 0: nothing")
    ceiling: Size | None = Field(None, description="the most the model may hold; null: no ceiling of its own")


class LimitsBody(BaseModel):
    """New limits; what is left out stays as it is. All of it holds, or none."""

    model_config = ConfigDict(extra="forbid")

    budget: Size | None = Field(None, description="what all models together may hold in each KV rank's pool")
    models: dict[str, ModelLimitsBody] = Field({}, max_length=256, description="by name or alias")


@router.get("/admin/limits", summary="Budget, floors and ceilings of the KV pool", responses=ERRORS)
async def show_limits(request: Request) -> dict[str, Any]:
    return _shown(request.app.state)


@router.patch("/admin/limits", summary="Change budget, floors or ceilings of the KV pool", responses=CHANGES)
async def change_limits(body: LimitsBody, request: Request) -> dict[str, Any]:
    """Holds for what is admitted from now on. Live requests keep their pages and what they were promised."""
    state = request.app.state
    try:
        state.engine.set_limits(_change(body, state))
    except ValueError as error:
        raise bad_request(str(error), code="unreachable_limit") from None
    return _shown(state)


def _change(body: LimitsBody, state: State) -> LimitChange:
    known = {info.name for info in state.engine.models()}
    floors: dict[str, int] = {}
    ceilings: dict[str, int | None] = {}
    for given, limits in body.models.items():
        name = given if given in known else state.catalogue.resolve(given).name
        if "floor" in limits.model_fields_set:
            floors[name] = parse_size(limits.floor or 0)
        if "ceiling" in limits.model_fields_set:
            ceilings[name] = None if limits.ceiling is None else parse_size(limits.ceiling)
    budget = None if body.budget is None else parse_size(body.budget)
    return LimitChange(budget_bytes=budget, floor_bytes=floors, ceiling_bytes=ceilings)


def _shown(state: State) -> dict[str, Any]:
    stats: EngineStats = state.engine.stats()
    infos = {info.name: info for info in state.engine.models()}
    pools = {pool.kv_rank: pool for pool in stats.pools}
    return {
        "object": "limits",
        "pools": [_pool_row(pool) for pool in stats.pools],
        "models": _model_rows(stats, infos, pools),
    }


def _pool_row(pool: PoolStats) -> dict[str, Any]:
    return {
        "kv_rank": pool.kv_rank,
        "pool_bytes": pool.frames_budget * pool.frame_bytes,
        "budget_bytes": pool.frames_limit * pool.frame_bytes,
        "floors_bytes": pool.frames_kept * pool.frame_bytes,
        "used_bytes": pool.frames_used * pool.frame_bytes,
        "reserved_bytes": pool.frames_reserved * pool.frame_bytes,
        "settling": pool.is_settling,
    }


def _model_rows(
    stats: EngineStats, infos: Mapping[str, ModelInfo], pools: Mapping[str, PoolStats]
) -> list[dict[str, Any]]:
    rows = []
    for model in stats.models:
        info = infos.get(model.name)
        pool = pools.get(info.kv_rank) if info is not None else None
        if info is None or pool is None:  # it has just come or gone
            continue
        frame_bytes = pool.frame_bytes
        ceiling = model.frames_ceiling
        rows.append(
            {
                "name": model.name,
                "kv_rank": pool.kv_rank,
                "floor_bytes": model.frames_floor * frame_bytes,
                "ceiling_bytes": None if ceiling is None else ceiling * frame_bytes,
                "reach_bytes": model.frames_reach * frame_bytes,
                "page_bytes": model.frames_per_page * frame_bytes,
                "used_bytes": model.frames_used * frame_bytes,
                "reserved_bytes": model.frames_reserved * frame_bytes,
                "context_limit": info.context_limit,
            }
        )
    return rows


class TrimBody(BaseModel):
    """Whose pages."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="a served name or alias; default: all models")


@router.post("/admin/prefix_cache/trim", summary="Give cached pages that nobody uses back", responses=CHANGES)
async def trim(request: Request, body: Annotated[TrimBody | None, Body()] = None) -> dict[str, Any]:
    """Pages that live requests use stay. New requests never need this: they take cached pages like free ones."""
    state = request.app.state
    served = [info for info in state.engine.models() if info.state in ("ready", "draining")]
    frame_bytes = {pool.kv_rank: pool.frame_bytes for pool in state.engine.stats().pools}
    if body is not None and body.model is not None:
        name = state.catalogue.resolve(body.model).name
        served = [info for info in served if info.name == name]
    freed: dict[str, int] = {}
    for info in served:
        with suppress(UnknownModelError):  # it has just gone
            freed[info.name] = state.engine.trim(info.name) * frame_bytes[info.kv_rank]
    return {"object": "prefix_cache", "freed_bytes": freed}
