"""One OpenTelemetry span for each request, sent by OTLP over HTTP. Needs the extra `otel`; plain ASGI.

A `traceparent` header of the client makes the span a part of the client's trace.
"""

from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosspool.errors import CrossPoolError
from crosspool.server.context import route_path


def make_provider(endpoint: str) -> Any:
    """A tracer provider that sends to `endpoint`, such as http://localhost:4318/v1/traces.

    Raises CrossPoolError, naming the remedy, where the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise CrossPoolError(
            f"otlp_traces_endpoint needs {error.name}; install crosspool[otel], or leave the setting out"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "crosspool"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Traces:
    """Spans have the route's name, status, request id, name of the API key and model; never a prompt or an answer."""

    def __init__(self, app: ASGIApp, provider: Any, quiet_paths: tuple[str, ...] = ()) -> None:
        self._app = app
        self._tracer = provider.get_tracer("crosspool.server")
        self._quiet_paths = frozenset(quiet_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in self._quiet_paths:
            await self._app(scope, receive, send)
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        context = extract(dict(Headers(scope=scope)))
        status = 0

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._tracer.start_as_current_span(scope["method"], context=context, kind=SpanKind.SERVER) as span:
            try:
                await self._app(scope, receive, send_and_look)
            finally:
                route = getattr(scope.get("route"), "path", None)
                if route is not None:  # a path that no route knows is the client's own words
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.route", route)
                span.set_attribute("http.request.method", scope["method"])
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
                state = scope.get("state", {})
                for attribute, name in (
                    ("crosspool.request_id", "request_id"),
                    ("crosspool.key", "key"),
                    ("gen_ai.request.model", "model"),
                ):
                    if name in state:
                        span.set_attribute(attribute, state[name])
