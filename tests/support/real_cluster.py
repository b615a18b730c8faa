"""Clusters of threads or processes for tests, with the fake backend, and what /proc says of them."""

import os
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crosspool.cluster.base import ModelReady, RankReady
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.rank_cluster import RankCluster
from crosspool.cluster.start import start_cluster
from tests.support.fake_backend import FakeModel
from tests.support.lane_driver import wait_for

BACKEND = "tests.support.fake_backend"
LAYOUTS = ("inprocess", "processes")
SHM = "/dev/shm"
SHM_S = 5.0
"""How long other processes' shared memory may have a name before anybody maps it."""


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
    found = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _children_of(task)]
    return [child for child in found if not _is_tracker(child)]


def _children_of(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
        return []


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


Holdings = dict[str, Counter[Hashable]]


def holdings() -> Holdings:
    """What this process holds that a cluster could leak, by kind."""
    return {
        "fds": Counter(_open_files()),
        "threads": Counter(threading.enumerate()),
        "children": Counter(children()),
        "shm": Counter(os.listdir(SHM)),
        "maps": Counter(["crosspool"] * Path("/proc/self/maps").read_text().count("crosspool")),
    }


def left_since(before: Holdings) -> dict[str, list[Hashable]]:
    """What has come since, by kind; none of what has gone meanwhile, which was another test's.

    Of shared memory, which belongs to the whole machine, what no living process has mapped and stays for SHM_S.
    """
    until_s = time.monotonic() + SHM_S
    while (left := _left(before)).get("shm") and time.monotonic() < until_s:
        time.sleep(0.05)
    return left


def _left(before: Holdings) -> dict[str, list[Hashable]]:
    left = {kind: list((now - before[kind]).elements()) for kind, now in holdings().items()}
    mapped = _mapped() if left["shm"] else ""
    left["shm"] = [name for name in left["shm"] if f"{SHM}/{name}" not in mapped]
    return {kind: found for kind, found in left.items() if found}


def _open_files() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            yield os.readlink(f"/proc/self/fd/{fd}")


def _mapped() -> str:
    """The maps of every process that this one may look at."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # another user's, or gone
            found.append(maps.read_text())
    return "".join(found)


def cpu_s(pid: int) -> float:
    """Processor seconds the process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
