"""One model on ranks in processes, stepped by hand: one sequence at a time, without an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.ranks.one_row_step import one_row_step
from crosspool.cluster.base import ModelFailed, ModelPlacement, ModelReady, RankFailed, RankLost, StepDone, StepFailed
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.start import start_cluster
from crosspool.core import SampledToken, SamplingParams
from crosspool.kv_pool.pool import Page

LOAD_TIMEOUT_S, STEP_TIMEOUT_S = 120.0, 30.0


class SteppedCluster:
    """Ranks start at once; `load` brings the model, `wait` waits for it."""

    def __init__(self, config: ClusterConfig, placement: ModelPlacement) -> None:
        self._cluster = start_cluster(config)
        self._placement = placement
        self._step_seq = 0

    def load(self) -> None:
        self._cluster.add_model(self._placement)

    def wait(self) -> None:
        """Until every rank has its share. Raises RuntimeError where one cannot."""
        until_s = time.monotonic() + LOAD_TIMEOUT_S
        while time.monotonic() < until_s:
            for event in self._cluster.poll(0.1):
                if isinstance(event, ModelFailed | RankFailed | RankLost):
                    raise RuntimeError(str(event))
                if isinstance(event, ModelReady):
                    return
        raise RuntimeError(f"{self._placement.name} is not ready after {LOAD_TIMEOUT_S:g} s")

    def step(
        self,
        sequence_id: int,
        token_ids: Sequence[int],
        num_cached: int,
        *,
        new_pages: Sequence[Page] = (),
        joining: SamplingParams | None = None,
    ) -> SampledToken:
        """The tokens at positions from `num_cached` on, and the one that is sampled after them. joining: it is new."""
        self._step_seq += 1
        step = one_row_step(
            self._placement.name,
            self._placement.kv_rank,
            self._step_seq,
            sequence_id,
            token_ids,
            num_cached,
            new_pages=new_pages,
            joining=joining,
        )
        self._cluster.submit(step)
        until_s = time.monotonic() + STEP_TIMEOUT_S
        while time.monotonic() < until_s:
            for event in self._cluster.poll(0.1):
                if isinstance(event, StepFailed | RankLost | RankFailed):
                    raise RuntimeError(str(event))
                if isinstance(event, StepDone):
                    (token,) = event.result.sampled
                    return token
        raise RuntimeError(f"step {self._step_seq} did not end within {STEP_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Stop the ranks. A second call does nothing."""
        self._cluster.close()
