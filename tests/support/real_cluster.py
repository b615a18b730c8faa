"""Clusters of threads or processes for tests, with the fake backend, and what /proc says of them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crosspool.cluster.base import ModelReady, RankReady
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.rank_cluster import RankCluster
from crosspool.cluster.start import start_cluster
from tests.support.fake_backend import FakeModel
from tests.support.lane_driver import wait_for

BACKEND = "tests.support.fake_backend"
LAYOUTS = ("inprocess", "processes")


def make_config(layout: str, num_weights_ranks: int = 1, **changes) -> ClusterConfig:
    fields = dict(
        layout=layout,
        weights_ranks=tuple(f"w{idx}" for idx in range(num_weights_ranks)),
        backend=BACKEND,
        num_frames=2,
        frame_bytes=4096,
        max_tokens_per_step=64,
    )
    return ClusterConfig(**(fields | changes))


@contextmanager
def running(config: ClusterConfig) -> Iterator[RankCluster]:
    """A started cluster whose ranks are all ready."""
    cluster = start_cluster(config)
    try:
        wait_for(cluster, RankReady, len(config.ranks))
        yield cluster
    finally:
        cluster.close()


def add_models(cluster: RankCluster, models: dict[str, FakeModel], directory: Path, ranks, kv_rank="kv0") -> None:
    for name, model in models.items():
        cluster.add_model(model.placement(name, directory / name, ranks, kv_rank))
    wait_for(cluster, ModelReady, len(models))


def pids(cluster: RankCluster) -> dict[str, int]:
    """The process of each rank; layout `processes` only."""
    return cluster.pids()


def children(pid: int | None = None) -> list[int]:
    """Live child processes, but for multiprocessing's own tracker, which lives as long as its parent."""
    pid = pid or os.getpid()
    tasks = Path(f"/proc/{pid}/task")
    found = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    return [child for child in found if not _is_tracker(child)]


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def holdings() -> dict[str, object]:
    """What this process holds that a cluster could leak."""
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": children(),
        "shm": sorted(os.listdir("/dev/shm")),
        "maps": Path("/proc/self/maps").read_text().count("crosspool"),
    }


def cpu_s(pid: int) -> float:
    """Processor seconds the process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
