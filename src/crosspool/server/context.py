"""What is known of the HTTP request that the running code works for: its id, API key and model."""

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

NOTHING: Mapping[str, Any] = MappingProxyType({})

CURRENT: ContextVar[Mapping[str, Any]] = ContextVar("crosspool_request", default=NOTHING)
"""The request's ASGI state. Tasks started for a request have it too."""


def current(name: str) -> str:
    """`request_id`, `key` or `model` of the present request; empty outside one or before it is known."""
    return str(CURRENT.get().get(name, ""))
