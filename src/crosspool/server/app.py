"""The FastAPI application: routes, guards, and every error in OpenAI's shape."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from crosspool import __version__
from crosspool.config import ServerConfig
from crosspool.errors import CrossPoolError
from crosspool.server import (
    admin_routes,
    generation_routes,
    health,
    kv_pool_routes,
    messages_routes,
    models_routes,
    responses_routes,
    stats_routes,
    token_routes,
    ui_routes,
)
from crosspool.server.admin_routes import Prepare
from crosspool.server.catalogue import Catalogue
from crosspool.server.context import route_path
from crosspool.server.direct_routes import DirectRoutes, direct_routes
from crosspool.server.engine_client import EngineClient
from crosspool.server.engine_metrics import EngineCollector
from crosspool.server.errors import APIError, ContextRefusal, error_response, from_engine, from_validation
from crosspool.server.guards import BodyLimit, HeaderLimit, KeyGuard, RequestContext
from crosspool.server.lingering import Lingering
from crosspool.server.metrics import RequestMetrics
from crosspool.server.metrics_compat import vllm_registry
from crosspool.server.request_form import RequestForm
from crosspool.server.stream import ClientLeft
from crosspool.server.tracing import Traces, make_provider

FOREIGN_SCHEMAS = ("HTTPValidationError", "ValidationError")


class DocumentedApp(FastAPI):
    """FastAPI documents a 422 of its own for wrong fields; here they are a 400, which routes declare themselves."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            for methods in document["paths"].values():
                for route in methods.values():
                    route["responses"].pop("422", None)
            for name in FOREIGN_SCHEMAS:
                document["components"]["schemas"].pop(name, None)
            self.openapi_schema = document
        return self.openapi_schema


logger = logging.getLogger(__name__)

GENERATION = (generation_routes.router, messages_routes.router, responses_routes.router)
ROUTERS = (
    *GENERATION,
    token_routes.router,
    models_routes.router,
    health.router,
    stats_routes.router,
    ui_routes.router,
    admin_routes.router,
    kv_pool_routes.router,
)
PATHS = [route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def create_app(
    engine: EngineClient, catalogue: Catalogue, config: ServerConfig | None = None, prepare: Prepare | None = None
) -> FastAPI:
    """The server of `catalogue`'s models on `engine`; `prepare` reads models that are to be loaded at run time.

    Setting `app.state.draining` makes it refuse new requests. `app.state.awaited` are the models of its start, for
    which readiness waits; it does not wait for models that are loaded later.
    """
    config = config or ServerConfig()
    app = DocumentedApp(
        title="CrossPool",
        version=__version__,
        description="Many Mixture-of-Experts models from two memory pools, behind the OpenAI API.",
        middleware=_middleware(config),
        strict_content_type=False,
        redirect_slashes=False,  # RequestForm takes them away
        docs_url=None,  # FastAPI's page loads its scripts from elsewhere; ours is at /docs
        redoc_url=None,
    )
    app.state.engine = engine
    app.state.catalogue = catalogue
    app.state.config = config
    app.state.draining = False
    app.state.awaited = {frontend.name for frontend in catalogue}
    app.state.prepare = prepare
    app.state.preparing = set()  # names of models whose files are just being found and read
    app.state.admin_tasks = set()
    app.state.metrics = RequestMetrics()
    app.state.metrics.registry.register(EngineCollector(engine))
    app.state.vllm_metrics = vllm_registry(app.state.metrics.registry) if config.metrics_compat == "vllm" else None
    for router in ROUTERS:
        app.include_router(router)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


def _middleware(config: ServerConfig) -> Sequence[Middleware]:
    """Outermost first."""
    found = [
        Middleware(Lingering, max_body_bytes=config.max_body_bytes),
        Middleware(RequestContext, quiet_paths=config.quiet_paths),
        Middleware(RequestForm),
    ]
    if config.otlp_traces_endpoint is not None:
        provider = make_provider(config.otlp_traces_endpoint)
        found.append(Middleware(Traces, provider=provider, quiet_paths=config.quiet_paths))
    if config.allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=["GET", "POST", "PATCH", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Request-Id", "Retry-After"],
            )
        )
    found.append(Middleware(HeaderLimit, max_header_bytes=config.max_header_bytes))
    found.append(Middleware(KeyGuard, api_keys=config.api_keys, admin_api_keys=config.admin_api_keys))
    found.append(Middleware(BodyLimit, max_body_bytes=config.max_body_bytes))
    handlers = {kind: handler for kind, handler in HANDLERS.items() if kind is not Exception}
    found.append(Middleware(DirectRoutes, routes=direct_routes(GENERATION), handlers=handlers))
    return found


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError), "registered for APIError"
    if isinstance(error, ContextRefusal):
        request.app.state.metrics.refused(request.state.model, error.code)
    return error_response(error, request.scope)


async def _engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CrossPoolError), "registered for CrossPoolError"
    return await _api_error(request, from_engine(error))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for RequestValidationError"
    return await _api_error(request, from_validation(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException"
    detail, path = str(error.detail), ascii(request.url.path)[1:-1][:200]
    if error.status_code == 404:
        detail = f"no route {request.method} {path}; {_nearest(request)}"
    if error.status_code == 405:
        detail = f"{path} takes {(error.headers or {}).get('Allow', 'other methods')}, not {request.method}"
    if error.status_code == 400:
        encoding = request.headers.get("content-encoding", "identity")
        detail = "the body is not JSON in UTF-8, or is nested too deeply"
        if encoding != "identity":
            detail = f"bodies in Content-Encoding {ascii(encoding)[1:-1][:40]} are not read; send it as plain JSON"
    code = CODES.get(error.status_code, "invalid_request")
    return await _api_error(request, APIError(error.status_code, detail, code=code, headers=dict(error.headers or {})))


def _nearest(request: Request) -> str:
    """The route that was meant, most often with or without /v1, or where all of them are listed."""
    found = get_close_matches(route_path(request.scope)[:200], PATHS, 1, 0.75)
    return f"did you mean {found[0]}?" if found else "GET /openapi.json lists them"


async def _client_left(request: Request, error: Exception) -> Response:
    """Nobody reads this; 499 is what proxies call it."""
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    """A bug of ours: its text stays in the log."""
    logger.error("unexpected error in %s %s", request.method, ascii(request.url.path), exc_info=error)
    return await _api_error(request, APIError(500, "internal error; the server's log has it", code="internal_error"))


Handler = Callable[[Request, Exception], Awaitable[Response]]

HANDLERS: dict[type[Exception], Handler | Any] = {
    APIError: _api_error,
    CrossPoolError: _engine_error,
    RequestValidationError: _invalid,
    HTTPException: _http_error,
    ClientLeft: _client_left,
    Exception: _unexpected,
}
