"""The ranks of an engine that a benchmark drives without a server: a process and a GPU for each."""

from __future__ import annotations

from collections.abc import Sequence

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.rank_cluster import RankCluster
from crosspool.cluster.start import start_cluster
from crosspool.engine.config import EngineConfig

SPIN_US = 200_000
START_TIMEOUT_S = 180


def start_gpu_ranks(weights_ranks: Sequence[str], engine: EngineConfig) -> RankCluster:
    """One KV rank and `weights_ranks`, started for this engine. The caller closes them, by the engine."""
    return start_cluster(
        ClusterConfig(
            backend="cuda",
            weights_ranks=tuple(weights_ranks),
            num_frames=engine.num_frames,
            frame_bytes=engine.frame_bytes,
            max_tokens_per_step=engine.max_tokens_per_step,
            num_lanes=engine.num_lanes,
            spin_us=SPIN_US,
            start_timeout_s=START_TIMEOUT_S,
        )
    )
