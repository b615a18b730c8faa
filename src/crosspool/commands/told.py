"""What `crosspool serve` says of its start: lines on the terminal, or records where every line is to be JSON."""

import logging
from collections.abc import Callable

from rich.console import Console

from crosspool.config import LogFormat

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]


def teller(console: Console, log_format: LogFormat = "auto") -> Tell:
    """Prints a line on `console`; with `json` it is a log record, so that nothing else stands between the objects."""
    if log_format == "json":
        return logger.info
    return lambda line: console.print(line, highlight=False, soft_wrap=True)
