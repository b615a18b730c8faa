"""What a line of the log looks like: text, or one JSON object. The server's and its ranks' processes share it."""

import logging
from collections.abc import Sequence
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def text_formatter(ranks: str = "") -> logging.Formatter:
    """ranks: of this process, where it is one of ranks."""
    return logging.Formatter(TEXT.replace("%(name)s", f"{ranks} %(name)s") if ranks else TEXT)


def json_formatter(*fields: Any) -> logging.Formatter:
    """Of every logger of the process. Fields given as `extra` are fields of the object.

    fields: structlog processors that add more.
    """
    import structlog  # what logs text does without

    chain: Sequence[Any] = (
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *fields,
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=chain,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(),
        ],
    )
