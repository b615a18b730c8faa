"""The prefix cache at run time: POST /admin/prefix_cache/trim. Guarded by an admin API key."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, ConfigDict, Field

from crosspool.server.limits_routes import CHANGES

router = APIRouter(tags=["admin"])


class TrimBody(BaseModel):
    """Whose pages."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="a served name or alias; default: all models")


@router.post("/admin/prefix_cache/trim", summary="Give cached pages that nobody uses back", responses=CHANGES)
async def trim(request: Request, body: Annotated[TrimBody | None, Body()] = None) -> dict[str, Any]:
    """Pages that live requests use stay. New requests never need this: they take cached pages like free ones."""
    state = request.app.state
    frame_bytes = {pool.kv_rank: pool.frame_bytes for pool in state.engine.stats().pools}
    served = [info for info in state.engine.models() if info.state in ("ready", "draining")]
    if body is not None and body.model is not None:
        name = state.catalogue.resolve(body.model).name
        served = [info for info in served if info.name == name]
    freed = {info.name: state.engine.trim(info.name) * frame_bytes[info.kv_rank] for info in served}
    return {"object": "prefix_cache", "freed_bytes": freed}
