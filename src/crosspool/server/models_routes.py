"""GET /v1/models and /v1/models/{name}: what is served, in which state, with how many bytes and how much context."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import State

from crosspool.engine.stats import ModelInfo
from crosspool.server.catalogue import ModelFrontend
from crosspool.server.engine_client import info_of
from crosspool.server.errors import ErrorBody

router = APIRouter(tags=["models"])

ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "the API key is missing or unknown"},
    404: {"model": ErrorBody, "description": "no model of that name is served"},
}


@router.get("/v1/models", summary="List the models", responses={401: ERRORS[401]})
async def list_models(request: Request) -> dict[str, Any]:
    cards = model_cards(request.app.state)
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {"first_id": None, "last_id": None}
    return {"object": "list", "data": cards, "has_more": False, **ends}


@router.get("/v1/models/{name:path}", summary="One model, by name or alias", responses=ERRORS)
async def one_model(name: str, request: Request) -> dict[str, Any]:
    state = request.app.state
    frontend = state.catalogue.resolve(name)
    return model_card(frontend, info_of(state.engine, frontend.name))


def model_cards(state: State) -> list[dict[str, Any]]:
    """Of every served model that the engine knows: not of one about to be loaded or just unloaded."""
    infos = {info.name: info for info in state.engine.models()}
    return [model_card(frontend, infos[frontend.name]) for frontend in state.catalogue if frontend.name in infos]


def model_card(frontend: ModelFrontend, info: ModelInfo) -> dict[str, Any]:
    """OpenAI's and Anthropic's fields, vLLM's max_model_len, and what only CrossPool knows under `crosspool`."""
    return {
        "id": frontend.name,
        "object": "model",
        "type": "model",
        "display_name": frontend.name,
        "created": int(info.created_s),
        "created_at": datetime.fromtimestamp(int(info.created_s), UTC).isoformat().replace("+00:00", "Z"),
        "owned_by": "crosspool",
        "root": frontend.source or frontend.name,
        "parent": None,
        "max_model_len": info.context_limit,
        "crosspool": {
            "state": info.state,
            "aliases": list(frontend.aliases),
            "weights_bytes": sum(info.bytes_by_rank.values()),
            "bytes_by_rank": info.bytes_by_rank,
            "loaded_bytes": info.loaded_bytes,
            "total_bytes": info.total_bytes,
            "load_s": info.load_s,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "kv_rank": info.kv_rank,
            "kv_ranks": list(info.kv_ranks),
            "kv_split": info.kv_split,
            "weights_ranks": list(info.weights_ranks),
            "has_chat_template": frontend.template is not None,
            "error": info.error,
        },
    }
