"""Models at run time: GET /admin/models, POST /admin/models/{name}/load and /unload. Guarded by an admin API key."""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from threading import Thread
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import State
from starlette.responses import JSONResponse

from crosspool.config import ModelConfig
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CapacityError, CheckpointError, CrossPoolError, UnknownModelError, UnsupportedModelError
from crosspool.pools_config import KVSplitChoice
from crosspool.server.catalogue import ModelFrontend
from crosspool.server.errors import APIError, ErrorBody, bad_request
from crosspool.server.health import judge_model

router = APIRouter(tags=["admin"])


class Prepared(Protocol):
    """A model whose small files are read and whose weights are not."""

    @property
    def served(self) -> ServedModel: ...

    @property
    def frontend(self) -> ModelFrontend: ...


Prepare = Callable[[ModelConfig], Prepared]
"""Finds (or downloads) a model and reads its small files; runs in a thread. Raises CheckpointError or
UnsupportedModelError."""

LOOK_S = 0.25
"""How soon a load that still prepares its model notices that the server shuts down."""


class LoadBody(BaseModel):
    """Which model to load, as an entry of `models:` in the configuration file."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, max_length=4096, description="a model directory, or a Hugging Face id")
    aliases: list[str] = Field([], max_length=16, description="other names that answer as this model")
    revision: str | None = Field(None, description="branch, tag or commit of a Hugging Face id")
    max_model_len: int | None = Field(None, ge=2, description="tokens of prompt + output")
    chat_template: str | None = Field(None, description="a file with a Jinja chat template")
    page_tokens: int | None = Field(None, ge=1, description="tokens of one KV page")
    kv_split: KVSplitChoice | None = Field(None, description="over KV ranks: heads, tokens, one or auto")
    wait: bool = Field(True, description="answer when the model is ready, not when its load has begun")


class UnloadBody(BaseModel):
    """How to unload."""

    model_config = ConfigDict(extra="forbid")

    drain: bool = Field(True, description="let accepted requests end; false ends them with an error")
    wait: bool = Field(True, description="answer when the memory is free, not when unloading has begun")


ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "the admin API key is missing or unknown"},
    403: {"model": ErrorBody, "description": "the server was started without an admin API key"},
}
CHANGES: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    202: {"description": "begun; GET /admin/models says how far it is"},
    400: {"model": ErrorBody, "description": "a field is wrong, or the model cannot be loaded"},
    404: {"model": ErrorBody, "description": "no model of that name is served"},
    409: {"model": ErrorBody, "description": "the name is taken, or the model is just being loaded"},
    413: {"model": ErrorBody, "description": "the body is too large"},
    500: {"model": ErrorBody, "description": "the engine failed"},
    503: {"model": ErrorBody, "description": "the server shuts down, or a worker is lost"},
}


@router.get("/admin/models", summary="Every model with state, health, memory and load", responses=ERRORS)
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": _rows(request.app.state)}


@router.post("/admin/models/{name:path}/load", summary="Load a model", responses=CHANGES, response_model=None)
async def load(name: str, body: LoadBody, request: Request) -> JSONResponse:
    """The other models go on while it loads. 202 without `wait`."""
    state = request.app.state
    _check_open(state)
    if state.prepare is None:
        raise APIError(400, "this server cannot load models at run time", code="unsupported")
    names = {name, *body.aliases}
    _check_names(names)
    _check_free(names, state)
    config = ModelConfig(
        source=body.path, name=name, **body.model_dump(exclude={"path", "aliases", "wait"}), aliases=tuple(body.aliases)
    )
    state.preparing |= names
    try:
        prepared = await _prepared(state, config)
    except (CheckpointError, UnsupportedModelError) as error:
        raise bad_request(str(error), param="path", code="cannot_load") from None
    finally:
        state.preparing -= names
    state.catalogue.add(prepared.frontend)
    return await _done(state, _load(state, prepared), name, wait=body.wait)


@router.post("/admin/models/{name:path}/unload", summary="Unload a model", responses=CHANGES, response_model=None)
async def unload(
    name: str, request: Request, body: Annotated[UnloadBody, Body(default_factory=UnloadBody)]
) -> JSONResponse:
    """New requests are refused at once; accepted ones end first, unless `drain` is false. 202 without `wait`."""
    state = request.app.state
    known = {info.name for info in state.engine.models()}
    own = name if name in known else state.catalogue.resolve(name).name
    return await _done(state, _unload(state, own, drain=body.drain), own, wait=body.wait)


async def _prepared(state: State, config: ModelConfig) -> Prepared:
    """The model as `state.prepare` finds it, in a thread that the process's end does not wait for.

    Raises what it raises, and APIError once the server shuts down.
    """
    found: Future[Prepared] = Future()

    def prepare() -> None:
        try:
            found.set_result(state.prepare(config))
        except Exception as error:  # the caller's to judge
            found.set_exception(error)

    run = contextvars.copy_context().run  # log lines name the request
    Thread(target=run, args=(prepare,), name=f"prepare-{config.served_name}", daemon=True).start()
    waiting = asyncio.wrap_future(found)
    waiting.add_done_callback(_seen)
    while not waiting.done():
        _check_open(state)
        await asyncio.wait({waiting}, timeout=LOOK_S)
    return waiting.result()


async def _load(state: State, prepared: Prepared) -> None:
    name = prepared.served.name
    try:
        await state.engine.add_model(prepared.served)
    except ValueError as error:
        state.catalogue.remove(name)
        raise APIError(409, str(error), code="model_exists", param="name") from None
    except (CheckpointError, CapacityError) as error:
        state.catalogue.remove(name)
        raise bad_request(str(error), param="path", code="cannot_load") from None
    except CrossPoolError:
        state.catalogue.remove(name)
        raise


async def _unload(state: State, name: str, *, drain: bool) -> None:
    awaited, is_known = {name} & state.awaited, name in state.catalogue
    state.awaited -= awaited  # before the engine lets it go, so that readiness does not wait for it
    try:
        await state.engine.remove_model(name, drain=drain)
    except ValueError as error:
        state.awaited |= awaited
        raise APIError(409, str(error), code="model_loading", param="name") from None
    except UnknownModelError as error:  # its turn has not come yet; or an unload ends, and the catalogue knows later
        state.awaited |= awaited
        raise APIError(404, str(error), code="model_not_found", param="name") from None
    if is_known:  # else the name was free, and may be another model's by now
        state.catalogue.remove(name)


async def _done(state: State, work: Coroutine[Any, Any, None], name: str, *, wait: bool) -> JSONResponse:
    """Do `work` in a task of its own: it goes on when the client leaves. Errors of its first moment are told always."""
    task = asyncio.create_task(work, name=f"admin {name}")
    state.admin_tasks.add(task)
    task.add_done_callback(state.admin_tasks.discard)
    if not wait:
        await asyncio.wait({task}, timeout=0.05)
        if not task.done():
            task.add_done_callback(_seen)
            return JSONResponse({"name": name, "models": _rows(state)}, 202)
    await asyncio.shield(task)
    return JSONResponse({"name": name, "models": _rows(state)})


def _seen(work: "asyncio.Future[Any]") -> None:
    """Somebody may have stopped waiting: then its failure is in the model's state and in the engine's log."""
    if not work.cancelled():
        work.exception()


def _check_open(state: State) -> None:
    if state.draining:
        raise APIError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def _check_names(names: Iterable[str]) -> None:
    """No request's path can name a model without a name, or with a slash at the end."""
    for name in names:
        if not name or name.endswith("/"):
            raise bad_request(f"the name {name!r} is empty or ends with /; choose another", param="name")


def _check_free(names: Iterable[str], state: State) -> None:
    for name in sorted(names):
        if name in state.preparing:
            raise APIError(409, f"a model of the name {name!r} is just being prepared", code="model_loading")
        if name in state.catalogue:
            raise APIError(
                409, f"the name {name!r} is taken; unload that model first or choose another", code="model_exists"
            )


def _rows(state: State) -> list[dict[str, Any]]:
    """One row for each model the engine knows, failed ones included."""
    stats = state.engine.stats()
    loads = {load.name: load for load in stats.models}
    frontends = {frontend.name: frontend for frontend in state.catalogue}
    rows = []
    for info in state.engine.models():
        load, frontend = loads.get(info.name), frontends.get(info.name)
        rows.append(
            {
                "name": info.name,
                "state": info.state,
                "health": judge_model(info, stats).body(),
                "aliases": list(frontend.aliases) if frontend else [],
                "source": frontend.source if frontend else None,
                "error": info.error,
                "context_limit": info.context_limit,
                "bytes_by_rank": info.bytes_by_rank,
                "loaded_bytes": info.loaded_bytes,
                "total_bytes": info.total_bytes,
                "load_s": info.load_s,
                "num_queued": load.num_queued if load else 0,
                "num_running": load.num_prefilling + load.num_decoding + load.num_parked if load else 0,
                "pages_used": load.pages_used if load else 0,
                "pages_reserved": load.pages_reserved if load else 0,
            }
        )
    return rows
