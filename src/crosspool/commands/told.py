"""What `crosspool serve` says of its start: lines on the terminal, or records where every line is to be JSON."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from threading import Thread

from rich.console import Console

from crosspool.config import LogFormat

logger = logging.getLogger(__name__)

JOIN_S = 1.0

Tell = Callable[[str], None]


@contextlib.contextmanager
def above_bars(console: Console) -> Iterator[int | None]:
    """A descriptor for ranks' processes to write to, as long as this is open; None where no bars are drawn."""
    if not console.is_terminal:
        yield None
        return
    readable, writable = os.pipe()
    thread = Thread(target=_print, args=(readable, console), name="crosspool-rank-lines", daemon=True)
    thread.start()
    try:
        yield writable
    finally:
        os.close(writable)
        thread.join(JOIN_S)  # ranks that live on, because they could not be ended, hold the other end


def _print(readable: int, console: Console) -> None:
    with open(readable, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            console.print(line.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)


def teller(console: Console, log_format: LogFormat = "auto") -> Tell:
    """Prints a line on `console`; with `json` it is a log record, so that nothing else stands between the objects."""
    if log_format == "json":
        return logger.info
    return lambda line: console.print(line, highlight=False, soft_wrap=True)
