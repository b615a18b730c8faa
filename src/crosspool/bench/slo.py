"""Goodput: the served requests that keep every limit a user has set."""

from collections.abc import Sequence
from dataclasses import dataclass

from crosspool.bench.record import RequestRecord

METRICS = ("ttft", "tbt", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Limits in milliseconds; `tbt` is kept when every gap of the answer keeps it."""

    limits_ms: tuple[tuple[str, float], ...]

    @property
    def words(self) -> str:
        """As on the command line."""
        return " ".join(f"{name}:{limit:g}" for name, limit in self.limits_ms)

    def is_met(self, record: RequestRecord) -> bool:
        return record.outcome == "served" and all(_worst_ms(name, record) <= limit for name, limit in self.limits_ms)


def parse_objective(words: Sequence[str]) -> Objective:
    """Of `ttft:500 tpot:50`. Raises ValueError naming the word."""
    limits = []
    for word in (part for text in words for part in text.split()):
        name, _, limit = word.partition(":")
        name = {"itl": "tbt", "e2e": "e2el"}.get(name, name)
        try:
            number = float(limit)
        except ValueError:
            number = -1.0
        if name not in METRICS or not number > 0:
            raise ValueError(f"goodput is {word!r}; it must be like ttft:500, with one of {', '.join(METRICS)} and ms")
        limits.append((name, number))
    return Objective(limits_ms=tuple(limits))


def _worst_ms(name: str, record: RequestRecord) -> float:
    if name == "ttft":
        return 1e3 * record.ttft_s
    if name == "tbt":
        return 1e3 * float(max(record.gaps_s, default=0.0))
    if name == "tpot":
        return 1e3 * (record.tpot_s or 0.0)
    return 1e3 * record.e2e_s
