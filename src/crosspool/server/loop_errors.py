"""What goes wrong in the event loop itself: in a line where connections are to blame, with a traceback where we are."""

import asyncio
import errno
import logging
import time
from typing import Any

import h11

logger = logging.getLogger(__name__)

SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Why the system does not take a connection though one waits."""

LINE_EVERY_S = 10.0


class LoopErrors:
    """The loop's exception handler.

    Connections that cannot be taken wait until others have ended. asyncio asks again at once, as often as connections
    may wait, and would write a traceback each time; here a line comes now and then.

    Bytes that are no HTTP behind an answer that has begun: uvicorn has told of them, and cannot answer a second time;
    their connection is closed by now.
    """

    def __init__(self) -> None:
        self._next_line_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            self._tell(error)
        elif isinstance(error, h11.LocalProtocolError):
            logger.debug("a connection is closed: %s", error)
        else:
            loop.default_exception_handler(context)

    def _tell(self, error: OSError) -> None:
        if time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + LINE_EVERY_S
            logger.warning(
                "connections wait, since the system takes no more: %s; allow more open files (ulimit -n)",
                error.strerror,
            )
