"""Log records as JSON: one object a line, with the request's id, API key name and model where there is a request."""

import logging
from typing import Any

import structlog

from crosspool.server.context import current


def json_formatter() -> logging.Formatter:
    """Of every logger of the process. Fields given as `extra` are fields of the object."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_request,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(),
        ],
    )


def _add_request(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    for name in ("request_id", "key", "model"):
        if name not in event and (value := current(name)):
            event[name] = value
    return event
