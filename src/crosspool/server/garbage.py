"""When cyclic garbage is collected: once a request has ended, not while one begins.

A young collection takes as long as a third of a request's way to its first token, and Python starts one whenever some
hundred objects have come: so within requests, since they are what makes objects. While the server runs, Python's own
threshold is far away.
"""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 300
"""Objects since the last collection from which one is worth its while."""

FAR = 5000
"""Objects after which Python collects by itself, whatever the server does."""

AGES = 10
"""Collections of one generation from which the next older one is collected too, as Python itself has it."""

FULL_SHARE = 0.002
"""Of the time, at most, goes to full collections."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Python itself collects garbage only where `Garbage` leaves much of it."""
    before = gc.get_threshold()
    gc.set_threshold(FAR, AGES, AGES)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def settle_memory() -> None:
    """Take what is loaded out of the garbage collector's sight: a full collection of it would hold up every stream."""
    gc.collect()
    gc.freeze()


class Garbage:
    """Collects on the event loop, between two callbacks."""

    def __init__(self) -> None:
        self._is_due = False
        self._full_from_s = 0.0

    def request_ended(self) -> None:
        """Collect soon, if there is enough."""
        if not self._is_due and gc.get_count()[0] >= YOUNG:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._collect)

    def _collect(self) -> None:
        self._is_due = False
        _, num_young, num_middle = gc.get_count()
        if num_young < AGES:
            gc.collect(0)
        elif num_middle < AGES or time.monotonic() < self._full_from_s:
            gc.collect(1)
        else:
            started_s = time.monotonic()
            gc.collect()
            ended_s = time.monotonic()
            self._full_from_s = ended_s + (ended_s - started_s) / FULL_SHARE
