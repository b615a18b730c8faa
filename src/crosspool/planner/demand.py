"""Active KV of one model at random moments: closed forms, independent snapshots, and paths over time.

For request i (arrival A, prompt P, output D, residence T) at age u: Q(u) = P + D * u / T for 0 <= u < T, else 0, and
K(t) = sum over i of kappa * Q(t - A). Source: CrossPool, arXiv 2606.24506, eqs. 1-3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crosspool.planner.holding import Holding
from crosspool.planner.request_table import RequestTable
from crosspool.workload.arrivals import ArrivalProcess, Poisson, RecordedArrivals, WindowedBursts
from crosspool.workload.trace import FloatColumn

MAX_PAIRS = 1 << 21
"""(request, moment) pairs that are expanded at once: bounds memory, not results."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelLoad:
    """Requests of one model: when they come, what they are, what they hold."""

    name: str
    arrivals: ArrivalProcess
    requests: RequestTable
    holding: Holding

    def __post_init__(self) -> None:
        if isinstance(self.arrivals, RecordedArrivals) and len(self.arrivals.times_s) != self.requests.num_rows:
            raise ValueError(
                f"{self.name}: {len(self.arrivals.times_s)} recorded arrivals, {self.requests.num_rows} requests; "
                "give one row for each"
            )

    @property
    def mean_live(self) -> float:
        """Requests alive at a random moment (Little's law)."""
        return self.arrivals.rate_rps * self.requests.mean_service_s

    @property
    def is_stationary(self) -> bool:
        """Poisson: any moment is like any other, and moments can be drawn independently."""
        return isinstance(self.arrivals, Poisson)

    @property
    def period_s(self) -> float:
        """After how long the process repeats itself; 0 where it has no clock."""
        arrivals = self.arrivals
        return arrivals.period_s if isinstance(arrivals, RecordedArrivals | WindowedBursts) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ActiveKV:
    """Bytes held at each moment: tokens counted exactly, and in whole pages."""

    exact: FloatColumn
    paged: FloatColumn

    def __add__(self, other: "ActiveKV") -> "ActiveKV":
        return ActiveKV(self.exact + other.exact, self.paged + other.paged)


def mean_bytes(load: ModelLoad) -> float:
    """E[K] = lambda * E[T * (start + growth / 2)], tokens counted exactly. Holds for any stationary arrivals."""
    start, growth = _start_and_growth_bytes(load)
    return float(load.arrivals.rate_rps * (load.requests.service_s * (start + growth / 2)).mean())


def variance_bytes(load: ModelLoad) -> float:
    """Var[K] = lambda * E[T * (start^2 + start * growth + growth^2 / 3)]: exact for Poisson arrivals only."""
    start, growth = _start_and_growth_bytes(load)
    second_moment = start**2 + start * growth + growth**2 / 3
    return float(load.arrivals.rate_rps * (load.requests.service_s * second_moment).mean())


def _start_and_growth_bytes(load: ModelLoad) -> tuple[FloatColumn, FloatColumn]:
    start, growth = load.holding.start_and_growth(load.requests)
    per_token = float(load.holding.kv_bytes_per_token)
    return load.holding.exact_bytes(start.astype(np.float64)), growth.astype(np.float64) * per_token


def snapshots(load: ModelLoad, rng: np.random.Generator, num: int) -> ActiveKV:
    """K at `num` independent random moments of a Poisson load.

    The number of live requests is Poisson with mean lambda * E[T]; each of them is length-biased (its row is met with
    probability proportional to T) and at a uniform age.
    """
    exact, paged = np.zeros(num), np.zeros(num)
    if load.mean_live == 0:
        return ActiveKV(exact, paged)
    start, growth = load.holding.start_and_growth(load.requests)
    cumulative = np.cumsum(load.requests.service_s)
    step = max(1, int(MAX_PAIRS / (load.mean_live + 1)))
    for low in range(0, num, step):
        counts = rng.poisson(load.mean_live, min(step, num - low))
        moment = low + np.repeat(np.arange(len(counts)), counts)
        rows = np.searchsorted(cumulative, rng.random(len(moment)) * cumulative[-1], side="right")
        tokens = start[rows] + growth[rows] * rng.random(len(moment))
        _add(exact, moment, load.holding.exact_bytes(tokens))
        _add(paged, moment, load.holding.paged_bytes(tokens))
    return ActiveKV(exact, paged)


def draw_path(
    load: ModelLoad, rng: np.random.Generator, start_s: float, stop_s: float
) -> tuple[FloatColumn, npt.NDArray[np.int64]]:
    """Arrivals and table rows of all requests that may be alive in [start_s, stop_s).

    Begins one longest service time before `start_s`, so that the window opens on a pool that is already in use.
    """
    begin = start_s - float(load.requests.service_s.max())
    if isinstance(load.arrivals, RecordedArrivals):
        return load.arrivals.indexed(begin, stop_s)
    times = load.arrivals.draw(rng, begin, stop_s)
    return times, rng.integers(0, load.requests.num_rows, len(times))


def along_path(load: ModelLoad, rng: np.random.Generator, moments_s: FloatColumn) -> ActiveKV:
    """K at sorted moments of one drawn (or recorded) path of arrivals, exact at each of them."""
    exact, paged = np.zeros(len(moments_s)), np.zeros(len(moments_s))
    if not len(moments_s):
        return ActiveKV(exact, paged)
    times, rows = draw_path(load, rng, float(moments_s[0]), float(np.nextafter(moments_s[-1], np.inf)))
    start, growth = load.holding.start_and_growth(load.requests)
    service = load.requests.service_s[rows]
    first = np.searchsorted(moments_s, times, side="left")
    last = np.searchsorted(moments_s, times + service, side="left")
    for part in _slices(last - first):
        lengths = last[part] - first[part]
        request = np.repeat(np.arange(part.start, part.stop), lengths)
        offset = np.arange(len(request)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        moment = first[request] + offset
        progress = (moments_s[moment] - times[request]) / service[request]
        tokens = start[rows[request]] + growth[rows[request]] * progress
        _add(exact, moment, load.holding.exact_bytes(tokens))
        _add(paged, moment, load.holding.paged_bytes(tokens))
    return ActiveKV(exact, paged)


def _slices(num_pairs: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Consecutive slices of requests with at most about MAX_PAIRS pairs each."""
    cumulative = np.cumsum(num_pairs)
    low = 0
    while low < len(num_pairs):
        done = cumulative[low - 1] if low else 0
        high = max(low + 1, int(np.searchsorted(cumulative, done + MAX_PAIRS, side="right")))
        yield slice(low, high)
        low = high


def _add(total: FloatColumn, moment: npt.NDArray[np.int64], values: FloatColumn) -> None:
    total += np.bincount(moment, weights=values, minlength=len(total))
