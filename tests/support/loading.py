"""Loads without threads."""

from __future__ import annotations

from collections.abc import Callable


def start_now(run: Callable[[], None], name: str) -> None:
    """A `Start` that loads at once, for loops driven step by step."""
    run()
