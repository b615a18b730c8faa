"""Conditions that another thread or process makes true: awaited, since on a busy machine that may be late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 30.0
"""How long a condition may take that is true within milliseconds on an idle machine."""


def until(is_so: Callable[[], bool], told: Callable[[], object] = str) -> None:
    """Return once `is_so`; after PATIENCE_S fail with what `told` gives."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        _check(deadline_s, told)
        time.sleep(0.005)


async def soon(is_so: Callable[[], bool], told: Callable[[], object] = str) -> None:
    """`until`, while the tasks of this event loop go on."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        _check(deadline_s, told)
        await asyncio.sleep(0.005)


def _check(deadline_s: float, told: Callable[[], object]) -> None:
    assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:.0f} s: {told()}"
