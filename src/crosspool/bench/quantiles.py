"""Percentiles with an interval by bootstrap over requests.

Times between tokens of one request resemble each other, so requests are drawn again, each with all its values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosspool.workload.trace import FloatColumn

RESAMPLES = 200
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure and the interval that 95 % of samples like this one would give it in."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def percentile_estimates(groups: Sequence[FloatColumn], levels: Sequence[float], seed: int = 0) -> list[Estimate]:
    """An Estimate for each level (0 to 100) of all values; `groups` are the values of each request, not all empty."""
    values = np.concatenate([np.asarray(group, dtype=np.float64) for group in groups])
    if not len(values):
        raise ValueError("no values to take a percentile of")
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values, kind="stable")
    values, owners = values[order], owners[order]
    shares = np.asarray(levels, dtype=np.float64) / 100.0
    drawn = np.empty((RESAMPLES, len(shares)))
    rng = np.random.default_rng(seed)
    for row in range(RESAMPLES):
        times_drawn = np.bincount(rng.integers(0, len(groups), len(groups)), minlength=len(groups))
        below = np.cumsum(times_drawn[owners])
        if below[-1] == 0:  # only requests without values were drawn
            drawn[row] = np.percentile(values, levels)
            continue
        places = np.searchsorted(below, shares * below[-1], side="left")
        drawn[row] = values[np.minimum(places, len(values) - 1)]
    found = np.percentile(values, levels)
    tail = 100.0 * (1.0 - CONFIDENCE) / 2.0
    low, high = np.percentile(drawn, (tail, 100.0 - tail), axis=0)
    return [
        Estimate(value=float(value), low=float(min(value, bottom)), high=float(max(value, top)))
        for value, bottom, top in zip(found, low, high, strict=True)
    ]
