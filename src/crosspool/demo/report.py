"""What the demo measured: per model and for the shared pool. Numbers only; `view.py` draws them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from crosspool.demo.client import Answer


@dataclass(frozen=True, slots=True)
class PoolSample:
    """Frames in use by model at one moment, and what the lanes carried."""

    at_s: float
    frames_used: dict[str, int]
    lanes: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """One model's requests, seen from the client."""

    requests: int
    tokens: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFigures:
    """What sharing saved: the pool's peak beside the sum of each model's own peak (separate caches hold that)."""

    frame_bytes: int
    budget_frames: int
    peak_frames: int
    peak_frames_by_model: dict[str, int]
    separate_caches_frames: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    models: dict[str, ModelFigures]
    pool: PoolFigures
    samples: tuple[PoolSample, ...]
    answers: dict[str, str]
    wall_s: float
    tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_report(
    answers: Sequence[Answer], samples: Sequence[PoolSample], *, frame_bytes: int, budget_frames: int
) -> DemoReport:
    """Condense a finished run. Every model has at least one answer of at least two pieces."""
    first = min(answer.sent_s for answer in answers)
    last = max(answer.arrivals_s[-1] for answer in answers)
    by_model: dict[str, list[Answer]] = {}
    for answer in answers:
        by_model.setdefault(answer.request.model, []).append(answer)
    return DemoReport(
        models={model: _model_figures(theirs) for model, theirs in by_model.items()},
        pool=_pool_figures(samples, tuple(by_model), frame_bytes, budget_frames),
        samples=tuple(samples),
        answers={answer.request.model: answer.text for answer in answers if answer.request.shown},
        wall_s=last - first,
        tokens_per_s=sum(answer.num_tokens for answer in answers) / (last - first),
    )


def _model_figures(answers: Sequence[Answer]) -> ModelFigures:
    ttft_ms = np.array([answer.ttft_s for answer in answers]) * 1e3
    gaps_ms = np.array([gap for answer in answers for gap in answer.gaps_s]) * 1e3
    busy_s = max(answer.arrivals_s[-1] for answer in answers) - min(answer.sent_s for answer in answers)
    tokens = sum(answer.num_tokens for answer in answers)
    return ModelFigures(
        requests=len(answers),
        tokens=tokens,
        ttft_p50_ms=float(np.percentile(ttft_ms, 50)),
        ttft_p99_ms=float(np.percentile(ttft_ms, 99)),
        tbt_p50_ms=float(np.percentile(gaps_ms, 50)),
        tbt_p99_ms=float(np.percentile(gaps_ms, 99)),
        tokens_per_s=tokens / busy_s,
    )


def _pool_figures(
    samples: Sequence[PoolSample], models: tuple[str, ...], frame_bytes: int, budget_frames: int
) -> PoolFigures:
    peaks = {model: max((s.frames_used.get(model, 0) for s in samples), default=0) for model in models}
    return PoolFigures(
        frame_bytes=frame_bytes,
        budget_frames=budget_frames,
        peak_frames=max((sum(s.frames_used.values()) for s in samples), default=0),
        peak_frames_by_model=peaks,
        separate_caches_frames=sum(peaks.values()),
    )
