"""Log records as JSON: one object a line, with the request's id, API key name and model where there is a request."""

import logging
from typing import Any

import structlog

from crosspool import log_lines
from crosspool.server.context import current


def json_formatter() -> logging.Formatter:
    return log_lines.json_formatter(_add_request)


def _add_request(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    for name in ("request_id", "key", "model"):
        if name not in event and (value := current(name)):
            event[name] = value
    return event
