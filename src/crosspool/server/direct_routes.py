"""The routes that generate, called straight: the framework's way to a route takes as long as all else before a token.

Only the way is shorter. The framework keeps the routes, and everything that is not plain still comes to them over it:
another content type than JSON, and a body that cannot be read or that the route's model refuses. So what a client is
told of a bad body is written in one place.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosspool.server.context import route_path

Endpoint = Callable[[Any, Request], Awaitable[Response]]
Handlers = Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]

CONTENT_TYPES = frozenset({b"application/json", b"application/json; charset=utf-8"})


@dataclass(frozen=True, slots=True)
class DirectRoute:
    """A POST route whose endpoint takes a checked body and the request, and answers with a response as it is."""

    route: APIRoute
    body: type[BaseModel]
    endpoint: Endpoint


def direct_routes(routers: Iterable[APIRouter]) -> dict[str, DirectRoute]:
    """By path, those routes of `routers` that can be called straight."""
    found: dict[str, DirectRoute] = {}
    for router in routers:
        for route in router.routes:
            if not (isinstance(route, APIRoute) and route.methods == {"POST"}):
                continue
            asked = signature(route.endpoint)
            if asked.return_annotation is Response and list(asked.parameters) == ["body", "request"]:
                found[route.path] = DirectRoute(route, asked.parameters["body"].annotation, route.endpoint)
    return found


class DirectRoutes:
    """Plain ASGI, the innermost of the middleware. What an endpoint raises is answered by `handlers`, by its type."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, DirectRoute], handlers: Handlers) -> None:
        self._app = app
        self._routes = routes
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._found(scope)
        if found is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            seen = await _all_of(receive)
            body = _checked(found.body, seen)
            if body is None:
                await self._app(scope, _again(seen, receive), send_and_note)
                return
            scope["route"] = found.route
            response = await found.endpoint(body, request)
            await response(scope, receive, send_and_note)
        except Exception as error:
            handler = next((self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers), None)
            if handler is None or has_started:
                raise
            await (await handler(request, error))(scope, receive, send)

    def _found(self, scope: Scope) -> DirectRoute | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        found = self._routes.get(route_path(scope))
        if found is not None:
            for name, value in scope["headers"]:
                if name == b"content-type" and value.lower() not in CONTENT_TYPES:
                    return None
        return found


async def _all_of(receive: Receive) -> list[Message]:
    """The messages of one request's body, up to its end or that of the connection."""
    seen = [await receive()]
    while seen[-1]["type"] == "http.request" and seen[-1].get("more_body", False):
        seen.append(await receive())
    return seen


def _checked(model: type[BaseModel], seen: list[Message]) -> BaseModel | None:
    """The body; None where it is not whole, not JSON, or not what `model` takes."""
    if seen[-1]["type"] != "http.request":
        return None
    try:
        return model.model_validate(json.loads(b"".join([message.get("body", b"") for message in seen])))
    except (ValidationError, ValueError, RecursionError):
        return None


def _again(seen: list[Message], receive: Receive) -> Receive:
    """`receive`, from the beginning of the body."""
    left = iter(seen)

    async def receive_again() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return receive_again
