"""When requests arrive: Poisson, Gamma-bursty, a ramp, rates by time of day, or a recorded trace, all on one clock.

Every process is drawn for any interval, stationary from its first second on: nothing starts empty, so a caller that
wants the requests alive at time 0 draws from before it.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from crosspool.workload.trace import FloatColumn, IntColumn


class ArrivalProcess(Protocol):
    """Arrival times of one model's requests."""

    @property
    def rate_rps(self) -> float:
        """Mean arrivals per second over all time."""
        ...

    def draw(self, rng: np.random.Generator, start_s: float, stop_s: float) -> FloatColumn:
        """Sorted arrival times in [start_s, stop_s)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Poisson:
    """Independent arrivals at a constant rate."""

    rate_rps: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_rps)

    def draw(self, rng: np.random.Generator, start_s: float, stop_s: float) -> FloatColumn:
        count = rng.poisson(self.rate_rps * (stop_s - start_s))
        return np.sort(rng.uniform(start_s, stop_s, count))


@dataclass(frozen=True, kw_only=True, slots=True)
class GammaBursts:
    """Renewal process with Gamma intervals of coefficient of variation `cv`; above 1 arrivals come in bursts."""

    rate_rps: float
    cv: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_rps)
        if not self.cv > 0:
            raise ValueError(f"cv is {self.cv}; it must be above 0 (1: Poisson, more: bursts)")

    def draw(self, rng: np.random.Generator, start_s: float, stop_s: float) -> FloatColumn:
        return gamma_renewals(rng, self.rate_rps, self.cv, start_s, stop_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RateWindow:
    """A stretch of the period with its own rate and burstiness; it ends where the next begins."""

    start_s: float
    rate_rps: float
    cv: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedBursts:
    """Gamma renewals whose rate and cv change by window; the windows repeat every `period_s`.

    A client's day: most windows may have rate 0. Windows are sorted and do not overlap; between them is silence.
    """

    windows: tuple[RateWindow, ...]
    window_s: float
    period_s: float = 86400.0

    def __post_init__(self) -> None:
        starts = [window.start_s for window in self.windows]
        if any(later - earlier < self.window_s for earlier, later in pairwise(starts)):
            raise ValueError(f"windows of {self.window_s} s overlap; give sorted starts at least that far apart")
        if starts and (starts[0] < 0 or starts[-1] + self.window_s > self.period_s):
            raise ValueError(f"windows reach outside the period of {self.period_s} s; give a longer period_s")

    @property
    def rate_rps(self) -> float:
        return sum(window.rate_rps for window in self.windows) * self.window_s / self.period_s

    def scaled(self, factor: float) -> "WindowedBursts":
        """The same pattern with every rate times `factor`."""
        windows = (
            RateWindow(start_s=window.start_s, rate_rps=window.rate_rps * factor, cv=window.cv)
            for window in self.windows
        )
        return WindowedBursts(windows=tuple(windows), window_s=self.window_s, period_s=self.period_s)

    def draw(self, rng: np.random.Generator, start_s: float, stop_s: float) -> FloatColumn:
        parts = []
        first = int(np.floor(start_s / self.period_s))
        for period in range(first, int(np.ceil(stop_s / self.period_s))):
            for window in self.windows:
                begin = period * self.period_s + window.start_s
                begin, end = max(begin, start_s), min(begin + self.window_s, stop_s)
                if begin < end and window.rate_rps > 0:
                    parts.append(gamma_renewals(rng, window.rate_rps, window.cv, begin, end))
        return np.concatenate(parts) if parts else np.empty(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ramp:
    """A rate that goes from one to another in [0, duration_s), by equal steps or by equal factors; outside it is 0.

    Gamma renewals of coefficient of variation `cv` on a clock that runs at the rate of the moment.
    """

    start_rps: float
    end_rps: float
    duration_s: float
    is_exponential: bool = False
    cv: float = 1.0

    def __post_init__(self) -> None:
        for name in ("start_rps", "end_rps", "duration_s", "cv"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} of a ramp is {getattr(self, name)}; it must be above 0")

    @property
    def rate_rps(self) -> float:
        return self._expected(self.duration_s) / self.duration_s

    def draw(self, rng: np.random.Generator, start_s: float, stop_s: float) -> FloatColumn:
        start_s, stop_s = max(0.0, start_s), min(stop_s, self.duration_s)
        if stop_s <= start_s:
            return np.empty(0)
        return self._moments(gamma_renewals(rng, 1.0, self.cv, self._expected(start_s), self._expected(stop_s)))

    def _expected(self, moment_s: float) -> float:
        """Arrivals expected up to a moment."""
        share = moment_s / self.duration_s
        growth = self.end_rps / self.start_rps
        if self.is_exponential and growth != 1.0:
            return float(self.start_rps * self.duration_s / np.log(growth) * (growth**share - 1.0))
        return self.duration_s * share * (self.start_rps + (self.end_rps - self.start_rps) * share / 2.0)

    def _moments(self, expected: FloatColumn) -> FloatColumn:
        """The inverse of `_expected`."""
        start, change = self.start_rps, self.end_rps - self.start_rps
        if change == 0:
            return expected / start
        if self.is_exponential:
            growth = np.log(self.end_rps / start)
            moments: FloatColumn = self.duration_s * np.log1p(expected * growth / (start * self.duration_s)) / growth
            return moments
        root = np.sqrt(start**2 + 2.0 * change * expected / self.duration_s)
        return 2.0 * expected / (start + root)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedArrivals:
    """Times of a trace, repeated every `period_s`. Nothing is random."""

    times_s: FloatColumn
    period_s: float

    def __post_init__(self) -> None:
        if len(self.times_s) and not 0 <= self.times_s[0] <= self.times_s[-1] <= self.period_s:
            raise ValueError(f"recorded arrivals reach outside the period of {self.period_s} s; give a longer period_s")

    @property
    def rate_rps(self) -> float:
        return len(self.times_s) / self.period_s

    def draw(self, rng: np.random.Generator, start_s: float, stop_s: float) -> FloatColumn:
        return self.indexed(start_s, stop_s)[0]

    def indexed(self, start_s: float, stop_s: float) -> tuple[FloatColumn, IntColumn]:
        """Arrival times in [start_s, stop_s) and, for each, its row in the trace."""
        times: list[FloatColumn] = [np.empty(0)]
        rows: list[IntColumn] = [np.empty(0, dtype=np.int64)]
        for period in range(int(np.floor(start_s / self.period_s)), int(np.ceil(stop_s / self.period_s))):
            shifted = self.times_s + period * self.period_s
            low, high = np.searchsorted(shifted, (start_s, stop_s))
            times.append(shifted[low:high])
            rows.append(np.arange(low, high, dtype=np.int64))
        return np.concatenate(times), np.concatenate(rows)


def gamma_renewals(rng: np.random.Generator, rate_rps: float, cv: float, start_s: float, stop_s: float) -> FloatColumn:
    """Stationary renewal process: the first interval is the rest of one that was under way at `start_s`.

    Such an interval is length-biased (Gamma with shape + 1) and met at a uniform moment.
    """
    if rate_rps == 0 or stop_s <= start_s:
        return np.empty(0)
    shape = cv**-2
    scale = 1.0 / (rate_rps * shape)
    last = start_s + rng.gamma(shape + 1.0, scale) * rng.random()
    times = []
    while last < stop_s:
        expected = (stop_s - last) * rate_rps
        steps = rng.gamma(shape, scale, int(expected + 4.0 * cv * expected**0.5) + 8)
        block = last + np.concatenate(([0.0], np.cumsum(steps)))
        times.append(block[:-1])
        last = float(block[-1])
    if not times:
        return np.empty(0)
    drawn = np.concatenate(times)
    return drawn[: np.searchsorted(drawn, stop_s)]


def _check_rate(rate_rps: float) -> None:
    if not (rate_rps >= 0 and np.isfinite(rate_rps)):
        raise ValueError(f"rate is {rate_rps} requests/s; it must be 0 or more")
