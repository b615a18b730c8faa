"""What all models together hold of the KV pool: Monte Carlo until the quantile is known well enough.

Poisson loads are sampled at independent moments. All others share one clock, so that what peaks together in a trace, or
at the same hour, is added up as it happens. Each chunk of samples is drawn from its own seed: results depend on the
seed, the loads and their names, not on their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from zlib import crc32

import numpy as np

from crosspool.planner.demand import ActiveKV, ModelLoad, along_path, mean_bytes, snapshots, variance_bytes
from crosspool.planner.quantile import QuantileEstimate, estimate_grouped, estimate_quantile
from crosspool.workload.arrivals import RecordedArrivals
from crosspool.workload.trace import FloatColumn

CHUNK = 4096
MIN_PATHS = 8
MAX_CHUNKS = 256
NUM_BLOCKS = 32
"""Blocks of a recorded path that count as independent of each other."""
KEPT_PER_MODEL = 8
"""Chunks whose samples are kept for each model by itself."""
SHORTEST_HORIZON_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDemand:
    """One model's share. Bytes of whole pages, but for the closed forms (`mean`, `deviation`), which count tokens.

    deviation: exact for Poisson arrivals; for others it is that of the samples.
    """

    name: str
    mean_live: float
    mean_bytes: float
    deviation_bytes: float
    quantile_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PoolDemand:
    """Active KV of the whole pool at a random moment.

    paged: quantile in whole pages, which the budget is made of. exact: tokens counted exactly, as in the closed forms.
    reached: whether the interval of `paged` became as narrow as asked; a recorded trace cannot be prolonged.
    samples: of the paged sum, sorted.
    """

    paged: QuantileEstimate
    exact: QuantileEstimate
    models: tuple[ModelDemand, ...]
    mean_bytes: float
    precision: float
    reached: bool
    samples: FloatColumn

    def level(self, quantile: float) -> float:
        """Bytes that the paged sum does not exceed with this probability."""
        return float(np.quantile(self.samples, quantile, method="inverted_cdf"))

    def covered(self, budget_bytes: float) -> float:
        """Share of random moments at which the paged sum fits the budget."""
        return float(np.searchsorted(self.samples, budget_bytes, side="right") / len(self.samples))

    @property
    def pooling_gain(self) -> float:
        """Sum of the models' own quantiles over the quantile of their sum."""
        return sum(model.quantile_bytes for model in self.models) / self.paged.value if self.paged.value else 1.0


def estimate_pool(
    loads: Sequence[ModelLoad],
    *,
    quantile: float = 0.99,
    precision: float = 0.01,
    confidence: float = 0.95,
    seed: int = 0,
) -> PoolDemand:
    """Sample until half the confidence interval is at most `precision` of the value, or MAX_CHUNKS are drawn.

    An interval of one page is narrow enough too: the budget is made of pages.

    Raises ValueError for no load, and for a precision that is not above 0.
    """
    if not loads:
        raise ValueError("no model has a load; give at least one a rate or a trace")
    if not precision > 0:
        raise ValueError(f"precision is {precision}; it must be above 0, such as 0.01")
    sampler = _Sampler(loads, seed)
    check_at = sampler.min_chunks
    while True:
        sampler.draw_chunk()
        if sampler.num_chunks < check_at and sampler.num_chunks < sampler.max_chunks:
            continue
        paged = sampler.estimate(quantile, confidence, "paged")
        reached = paged.relative_half_width <= precision or paged.high - paged.low <= sampler.largest_page_bytes
        if reached or sampler.num_chunks >= sampler.max_chunks:
            break
        check_at = sampler.num_chunks + max(1, ceil(sampler.num_chunks / 4))
    return PoolDemand(
        paged=paged,
        exact=sampler.estimate(quantile, confidence, "exact"),
        models=tuple(sampler.model_demand(idx, quantile) for idx in range(len(loads))),
        mean_bytes=sum(mean_bytes(load) for load in loads),
        precision=precision,
        reached=reached,
        samples=np.sort(np.concatenate([chunk.paged for chunk in sampler.chunks])),
    )


class _Sampler:
    """Draws chunks and groups them: moments, replicated paths, or blocks of a recorded path."""

    def __init__(self, loads: Sequence[ModelLoad], seed: int) -> None:
        self.loads = loads
        self.seed = seed
        self.chunks: list[ActiveKV] = []
        self.by_model: list[list[FloatColumn]] = [[] for _ in loads]
        self.is_stationary = all(load.is_stationary for load in loads)
        self.is_recorded = any(isinstance(load.arrivals, RecordedArrivals) for load in loads)
        self.horizon_s = horizon_s(loads)
        self.largest_page_bytes = max(load.holding.page_bytes for load in loads)
        is_fixed = all(isinstance(load.arrivals, RecordedArrivals) for load in loads)
        self.min_chunks = 1 if self.is_recorded else 2 if self.is_stationary else MIN_PATHS
        self.max_chunks = 4 if is_fixed else MAX_CHUNKS  # only the moments differ: more of them would tell no more

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    def draw_chunk(self) -> None:
        number = len(self.chunks)
        moments = self._moments(number)
        total = ActiveKV(np.zeros(CHUNK), np.zeros(CHUNK))
        for idx, load in enumerate(self.loads):
            rng = np.random.default_rng([self.seed, number, crc32(load.name.encode())])
            active = snapshots(load, rng, CHUNK) if load.is_stationary else along_path(load, rng, moments)
            total += active
            if number < KEPT_PER_MODEL:
                self.by_model[idx].append(active.paged.astype(np.float32))
        self.chunks.append(total)

    def _moments(self, number: int) -> FloatColumn:
        """One uniform moment in each of CHUNK equal parts of the horizon."""
        rng = np.random.default_rng([self.seed, number])
        moments: FloatColumn = (np.arange(CHUNK) + rng.random(CHUNK)) * (self.horizon_s / CHUNK)
        return moments

    def estimate(self, quantile: float, confidence: float, kind: str) -> QuantileEstimate:
        chunks = [getattr(chunk, kind) for chunk in self.chunks]
        if self.is_stationary:
            return estimate_quantile(np.concatenate(chunks), quantile, confidence)
        if self.is_recorded:
            blocks = [chunk.reshape(NUM_BLOCKS, -1) for chunk in chunks]
            replaced = self.horizon_s / replacement_s(self.loads)
            return estimate_grouped(
                np.concatenate(blocks, axis=1), quantile, confidence, most_effective=max(1.0, replaced)
            )
        return estimate_grouped(np.stack(chunks), quantile, confidence)

    def model_demand(self, idx: int, quantile: float) -> ModelDemand:
        load, samples = self.loads[idx], np.concatenate(self.by_model[idx])
        deviation = sqrt(variance_bytes(load)) if load.is_stationary else float(samples.std(dtype=np.float64))
        level = np.quantile(samples, quantile, method="inverted_cdf")
        return ModelDemand(
            name=load.name,
            mean_live=load.mean_live,
            mean_bytes=mean_bytes(load),
            deviation_bytes=deviation,
            quantile_bytes=float(level),
        )


def horizon_s(loads: Sequence[ModelLoad]) -> float:
    """Length of one path: of a recorded trace its period; else long against how long requests stay, too."""
    period = max(load.period_s for load in loads)
    if any(isinstance(load.arrivals, RecordedArrivals) for load in loads):
        return period
    return max(SHORTEST_HORIZON_S, 100.0 * max(load.requests.mean_service_s for load in loads), period)


def replacement_s(loads: Sequence[ModelLoad]) -> float:
    """Seconds after which what the pool holds has been replaced: the integral of its autocorrelation.

    E[T^2] / E[T] for one model with constant holdings; over models, weighted with their variances.
    """
    variances = np.array([variance_bytes(load) for load in loads])
    stays = np.array([(load.requests.service_s**2).mean() / load.requests.mean_service_s for load in loads])
    return float(np.average(stays, weights=variances)) if variances.any() else float(stays.max())


def demand_over_time(loads: Sequence[ModelLoad], seed: int, num: int = 1024) -> tuple[FloatColumn, FloatColumn]:
    """One path for a picture: (num,) moments and (num_models, num) paged bytes on the loads' common clock."""
    stay = max(load.requests.mean_service_s for load in loads)
    length = max((load.period_s for load in loads), default=0.0) or 200.0 * stay
    moments = np.linspace(0.0, length, num, endpoint=False)
    paths = [
        along_path(load, np.random.default_rng([seed, 0, crc32(load.name.encode())]), moments).paged for load in loads
    ]
    return moments, np.stack(paths)
