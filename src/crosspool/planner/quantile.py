"""Quantiles with a confidence interval from order statistics, honest about samples that depend on each other.

The rank of the true quantile among n independent samples is binomial, so two order statistics enclose it. Samples along
a path of time are not independent: how far the share of samples below the quantile varies between independent groups
(replicated paths, or long blocks of one path) tells how many independent samples they are worth.
"""

from dataclasses import dataclass
from math import exp, floor, inf, lgamma, log, sqrt
from statistics import NormalDist

import numpy as np

from crosspool.workload.trace import FloatColumn


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantileEstimate:
    """`value` estimates the `quantile`; the true one lies in [low, high] with probability `confidence`.

    effective_samples: independent samples that the `num_samples` are worth.
    """

    quantile: float
    value: float
    low: float
    high: float
    confidence: float
    num_samples: int
    effective_samples: float

    @property
    def relative_half_width(self) -> float:
        """Half the interval over the value; 0 where the value is."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0


def estimate_quantile(samples: FloatColumn, quantile: float, confidence: float = 0.95) -> QuantileEstimate:
    """From independent samples. Raises ValueError for a quantile or confidence outside (0, 1)."""
    return _estimate(samples, quantile, confidence, float(len(samples)), 1.0)


def estimate_grouped(
    groups: FloatColumn, quantile: float, confidence: float = 0.95, *, most_effective: float = inf
) -> QuantileEstimate:
    """From groups of samples, (num_groups, samples_per_group): groups are independent, samples of one group are not.

    Few groups widen the interval by Student's t. most_effective: what the samples can be worth at most, from what is
    known about the process; groups that hardly ever exceed the quantile would say more. Raises ValueError for fewer
    than two groups.
    """
    num_groups = groups.shape[0]
    if num_groups < 2:
        raise ValueError("one group of samples tells nothing about their spread; give two or more")
    samples = groups.ravel()
    value = float(np.quantile(samples, _inside(quantile), method="inverted_cdf"))
    below = (groups <= value).mean(axis=1)
    spread = float(below.var(ddof=1)) / num_groups
    independent = quantile * (1 - quantile)
    most = min(float(len(samples)), most_effective)
    effective = most if spread == 0 else min(most, independent / spread)
    return _estimate(samples, quantile, confidence, effective, _student_factor(confidence, num_groups - 1))


def _estimate(
    samples: FloatColumn, quantile: float, confidence: float, effective: float, widen: float
) -> QuantileEstimate:
    quantile, confidence = _inside(quantile), _inside(confidence)
    if not len(samples):
        raise ValueError("there are no samples to take a quantile of")
    ordered = np.sort(samples)
    tail = (1 - confidence) / 2
    trials = max(1, floor(effective / widen**2))
    low = (binomial_quantile(trials, quantile, tail) - 1) / trials
    high = (binomial_quantile(trials, quantile, 1 - tail) + 1) / trials
    last = len(ordered) - 1
    return QuantileEstimate(
        quantile=quantile,
        value=float(ordered[min(last, max(0, int(np.ceil(quantile * len(ordered))) - 1))]),
        low=float(ordered[min(last, max(0, int(np.floor(low * len(ordered)))))]),
        high=float(ordered[min(last, max(0, int(np.ceil(high * len(ordered))) - 1))]),
        confidence=confidence,
        num_samples=len(ordered),
        effective_samples=effective,
    )


def binomial_quantile(trials: int, probability: float, level: float) -> int:
    """Smallest k with P[Binomial(trials, probability) <= k] >= level, summed exactly within ten standard deviations."""
    mean, deviation = trials * probability, sqrt(trials * probability * (1 - probability))
    first, last = max(0, floor(mean - 10 * deviation) - 1), min(trials, floor(mean + 10 * deviation) + 1)
    total = 0.0
    for k in range(first, last + 1):
        combinations = lgamma(trials + 1) - lgamma(k + 1) - lgamma(trials - k + 1)
        total += exp(combinations + k * log(probability) + (trials - k) * log(1 - probability))
        if total >= level:
            return k
    return last


def _student_factor(confidence: float, freedom: int) -> float:
    """Student's t over the normal quantile, by the expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return (z + first / freedom + second / freedom**2 + third / freedom**3) / z


def _inside(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"quantile or confidence is {level}; it must lie between 0 and 1, such as 0.99")
    return level
