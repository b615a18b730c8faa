"""What is known of the HTTP request that the running code works for: its id, API key and model; log records have it."""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import structlog
from starlette.types import Scope

from crosspool import log_lines

NOTHING: Mapping[str, Any] = MappingProxyType({})

CURRENT: ContextVar[Mapping[str, Any]] = ContextVar("crosspool_request", default=NOTHING)
"""The request's ASGI state. Tasks started for a request have it too."""


def current(name: str) -> str:
    """`request_id`, `key` or `model` of the present request; empty outside one or before it is known."""
    return str(CURRENT.get().get(name, ""))


def route_path(scope: Scope) -> str:
    """The request's path as routes have it: without the prefix that a proxy in front strips."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def json_formatter() -> logging.Formatter:
    """One JSON object a line, with what is known of the request."""
    return log_lines.json_formatter(_add_request)


def _add_request(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    for name in ("request_id", "key", "model"):
        if name not in event and (value := current(name)):
            event[name] = value
    return event
