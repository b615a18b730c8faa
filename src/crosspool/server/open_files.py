"""Open files: as many as the system lets this process have, and one line where they do not suffice.

A connection is a file. What a process may have at once is often 1,024 (`ulimit -n`), and as many as the administrator's
limit allows for the asking.
"""

import asyncio
import errno
import logging
import resource
import time
from typing import Any

logger = logging.getLogger(__name__)

SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Why the system does not take a connection though one waits."""

LINE_EVERY_S = 10.0


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as the administrator allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # some systems know a lower one than they tell
        logger.debug("the limit of %d open files stays: %s", soft, error)


class ShortageLines:
    """An exception handler of an event loop: connections that cannot be taken are told in a line now and then.

    They wait, and are taken once others have ended. asyncio asks again at once, as often as connections may wait, and
    would write a traceback each time.
    """

    def __init__(self) -> None:
        self._next_line_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in SHORTAGES):
            loop.default_exception_handler(context)
            return
        if time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + LINE_EVERY_S
            logger.warning(
                "connections wait, since the system takes no more: %s; allow more open files (ulimit -n)",
                error.strerror,
            )
