"""What a simulation counts: distributions by logarithmic bins, averages over time, and both for each model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, floor, log

BIN_WIDTH = 0.01
"""Logarithm of the ratio of two bin edges: quantiles are exact within 0.5 %."""


class Distribution:
    """Positive values with multiplicity: exact mean, quantiles within half a bin. Values of 0 are kept apart."""

    __slots__ = ("_bins", "count", "num_zeros", "total")

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self.count = 0
        self.num_zeros = 0
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        assert value >= -1e-9, f"{value} is negative"
        self.count += count
        self.total += value * count
        if value <= 1e-12:
            self.num_zeros += count
            return
        index = floor(log(value) / BIN_WIDTH)
        self._bins[index] = self._bins.get(index, 0) + count

    def merge(self, other: "Distribution") -> None:
        self.count += other.count
        self.num_zeros += other.num_zeros
        self.total += other.total
        for index, count in other._bins.items():
            self._bins[index] = self._bins.get(index, 0) + count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value that a share of all values do not exceed; 0 where there are none."""
        left = share * self.count - self.num_zeros
        if left <= 0 or not self.count:
            return 0.0
        for index in sorted(self._bins):
            left -= self._bins[index]
            if left <= 1e-9:
                return exp((index + 0.5) * BIN_WIDTH)
        raise AssertionError("the bins hold fewer values than were counted")


class TimeAverage:
    """A quantity over time: mean, peak, and quantiles over time in steps of a `resolution`."""

    __slots__ = ("_bins", "_resolution", "duration_s", "peak", "total")

    def __init__(self, resolution: float) -> None:
        self._resolution = resolution
        self._bins: dict[int, float] = {}
        self.duration_s = 0.0
        self.total = 0.0
        self.peak = 0.0

    def add(self, value: float, duration_s: float) -> None:
        """The quantity was `value` for `duration_s`."""
        if duration_s <= 0:
            return
        self.duration_s += duration_s
        self.total += value * duration_s
        self.peak = max(self.peak, value)
        index = int(value / self._resolution)
        self._bins[index] = self._bins.get(index, 0.0) + duration_s

    @property
    def mean(self) -> float:
        return self.total / self.duration_s if self.duration_s else 0.0

    def quantile(self, share: float) -> float:
        left = share * self.duration_s
        for index in sorted(self._bins):
            left -= self._bins[index]
            if left <= 0:
                return min(self.peak, (index + 1) * self._resolution)
        return self.peak


@dataclass(slots=True)
class ModelMeasures:
    """One model. ttft, queueing, tbt and residence in seconds; residence: from admission to the last token.

    request_tbt: each finished request's mean time between its tokens.
    """

    num_arrived: int = 0
    num_finished: int = 0
    num_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    ttft: Distribution = field(default_factory=Distribution)
    queueing: Distribution = field(default_factory=Distribution)
    tbt: Distribution = field(default_factory=Distribution)
    request_tbt: Distribution = field(default_factory=Distribution)
    residence: Distribution = field(default_factory=Distribution)

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())


def merged(parts: Sequence[ModelMeasures]) -> ModelMeasures:
    """All models as one."""
    whole = ModelMeasures()
    for part in parts:
        whole.num_arrived += part.num_arrived
        whole.num_finished += part.num_finished
        whole.num_tokens += part.num_tokens
        for reason, count in part.refused.items():
            whole.refused[reason] = whole.refused.get(reason, 0) + count
        for name in ("ttft", "queueing", "tbt", "request_tbt", "residence"):
            getattr(whole, name).merge(getattr(part, name))
    return whole
