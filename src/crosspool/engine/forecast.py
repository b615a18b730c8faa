"""How many output tokens a sequence is expected to reach: the difference between the admission policies."""

from bisect import bisect_right, insort
from collections import deque
from math import ceil
from typing import Protocol

NUM_LENGTHS_KEPT = 256
MIN_LENGTHS = 16
"""Longer outputs seen of a model, below which a forecast is no better than the worst case."""


class OutputEstimate(Protocol):
    """Output tokens set aside for a sequence, at least what it has and at most its `max_tokens`."""

    def expected_tokens(self, model: str, num_generated: int, max_tokens: int) -> int: ...

    def record(self, model: str, num_generated: int) -> None:
        """Learn the length of an output that ended by itself (an end token, a stop string, `max_tokens`)."""
        ...

    def forget(self, model: str) -> None: ...


class Reserve:
    """Everything a sequence may ask for. No sequence ever waits for a page."""

    def expected_tokens(self, model: str, num_generated: int, max_tokens: int) -> int:
        return max_tokens

    def record(self, model: str, num_generated: int) -> None:
        pass

    def forget(self, model: str) -> None:
        pass


class Forecast:
    """A quantile of the model's latest output lengths, given that the output is already longer than `num_generated`.

    Falls back to `max_tokens` while fewer than MIN_LENGTHS longer outputs have been seen. Outputs cut by their own
    `max_tokens` count with the length they had, so the forecast is low where most are cut; then sequences may wait
    for a page (never deadlock: admission.py), which `num_stalls` counts.
    """

    def __init__(self, quantile: float) -> None:
        self.quantile = quantile
        self._latest: dict[str, deque[int]] = {}
        self._sorted: dict[str, list[int]] = {}

    def expected_tokens(self, model: str, num_generated: int, max_tokens: int) -> int:
        lengths = self._sorted.get(model, [])
        first_longer = bisect_right(lengths, num_generated)
        num_longer = len(lengths) - first_longer
        if num_longer < MIN_LENGTHS:
            return max_tokens
        return min(max_tokens, lengths[first_longer + ceil(self.quantile * num_longer) - 1])

    def record(self, model: str, num_generated: int) -> None:
        latest = self._latest.setdefault(model, deque())
        lengths = self._sorted.setdefault(model, [])
        if len(latest) == NUM_LENGTHS_KEPT:
            lengths.remove(latest.popleft())
        latest.append(num_generated)
        insort(lengths, num_generated)

    def forget(self, model: str) -> None:
        self._latest.pop(model, None)
        self._sorted.pop(model, None)


def output_estimate(policy: str, quantile: float) -> OutputEstimate:
    """The estimate behind a named admission policy."""
    return Forecast(quantile) if policy == "forecast" else Reserve()
