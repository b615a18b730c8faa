"""Open files: as many as the system lets this process have.

A connection is a file. What a process may have at once is often 1,024 (`ulimit -n`), and as many as the administrator's
limit allows for the asking.
"""

import logging
import resource

logger = logging.getLogger(__name__)


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as the administrator allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # some systems know a lower one than they tell
        logger.debug("the limit of %d open files stays: %s", soft, error)
