"""Turns: which model comes next, of those that want a lane."""

from collections.abc import Collection


class Turns:
    """Fair turns: whoever waited longest since it last took a lane goes first.

    Between two turns of a model that is always ready, every other model takes at most one turn a lane.
    """

    def __init__(self) -> None:
        self._order: dict[str, None] = {}  # least recently served first

    def add(self, model: str) -> None:
        self._order[model] = None

    def remove(self, model: str) -> None:
        del self._order[model]

    def ready(self, models: Collection[str]) -> list[str]:
        """`models` in the order of their turns."""
        return [model for model in self._order if model in models]

    def take(self, model: str) -> None:
        """`model` has got a lane: it goes to the end."""
        del self._order[model]
        self._order[model] = None
