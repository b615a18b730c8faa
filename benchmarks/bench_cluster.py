"""What the cluster itself costs: a crossing and back, a step's control messages, a rank's restart, and idling.

    python -m benchmarks.bench_cluster

The workers compute nothing (`null_backend.py`), so all time is transport, rank loops and control. Layouts: threads, a
single thread for all ranks, processes that look at their flags for a while before they sleep, and ones that do not.
"""

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.report import Report
from crosspool.cluster.base import Event, ModelPlacement, ModelReady, RankReady, StepDone
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.rank_cluster import RankCluster
from crosspool.cluster.start import start_cluster
from crosspool.scheduler.step import StepDescriptor, StepHeader, StepRow

HIDDEN_SIZE = 2048
NUM_LAYERS = 48
LAYOUTS: dict[str, dict[str, object]] = {
    "threads": {"layout": "inprocess"},
    "one_thread": {"layout": "inprocess", "hosts": (("kv0", "w0"),)},
    "processes": {"layout": "processes"},
    "processes_no_spin": {"layout": "processes", "spin_us": 0.0},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--no-write", action="store_true", help="print, keep nothing")
    args = parser.parse_args()
    config = vars(args) | {"hidden_size": HIDDEN_SIZE, "num_layers": NUM_LAYERS}
    report = Report("cluster", hardware="cpu", config=config)
    report.summary = "Ranks that compute nothing: transport, rank loops and control of one KV and one weights rank."
    with tempfile.TemporaryDirectory() as scratch:
        for name, changes in LAYOUTS.items():
            measure(report, name, changes, Path(scratch), args.steps, args.restarts)
    print(report.as_markdown())
    if not args.no_write:
        report.write()
    return 0


def measure(
    report: Report, name: str, changes: dict[str, object], scratch: Path, num_steps: int, num_restarts: int
) -> None:
    """Add one layout's figures."""
    fields: dict[str, object] = {"num_frames": 1, "frame_bytes": 4096, "max_tokens_per_step": 32}
    cluster = start_cluster(ClusterConfig(backend="benchmarks.ranks.null_backend", **(fields | changes)))  # type: ignore[arg-type]
    try:
        _wait(cluster, RankReady, 2)
        for model, num_layers in (("deep", NUM_LAYERS), ("shallow", 1)):
            cluster.add_model(_placement(model, num_layers, scratch))
        _wait(cluster, ModelReady, 2)
        steps_s = _time_steps(cluster, "deep", 0, num_steps)
        control_s = _time_steps(cluster, "shallow", 1, num_steps)
        hops_us = [1e6 * (seconds - _median(control_s)) / (NUM_LAYERS - 1) for seconds in steps_s]
        report.samples(f"round_trip_us.{name}", hops_us, note="one token of 2048 floats to the weights rank and back")
        report.samples(f"step_of_one_layer_us.{name}", [1e6 * seconds for seconds in control_s])
        report.metric(f"idle_percent_of_a_core.{name}", _idle_percent(cluster), limit=2.0, note="all ranks and this")
        if changes["layout"] == "processes" and name == "processes":
            report.samples("restart_s", _time_restarts(cluster, num_restarts), note="from SIGKILL to RankReady")
    finally:
        cluster.close()


def _placement(name: str, num_layers: int, scratch: Path) -> ModelPlacement:
    directory = scratch / name
    directory.mkdir(exist_ok=True)
    (directory / "layers.json").write_text(str(num_layers))
    return ModelPlacement(
        name=name,
        directory=directory,
        hidden_size=HIDDEN_SIZE,
        kv_rank="kv0",
        weights_ranks=("w0",),
        page_tokens=16,
        frame_bytes=4096,
    )


def _time_steps(cluster: RankCluster, model: str, lane: int, num_steps: int) -> list[float]:
    """Seconds from each submit to its StepDone, after a tenth as many for warm-up."""
    seconds = []
    num_warmups = num_steps // 10
    for step_seq in range(1, num_warmups + num_steps + 1):
        row = StepRow(sequence_id=1, token_ids=None, num_cached_tokens=5, num_new_tokens=1)
        header = StepHeader(lane=lane, model=model, step_seq=step_seq, phase="decode", num_tokens=1)
        begun_s = time.perf_counter()
        cluster.submit(StepDescriptor(header=header, rows=(row,)))
        _wait(cluster, StepDone, 1)
        seconds.append(time.perf_counter() - begun_s)
    return seconds[num_warmups:]


def _time_restarts(cluster: RankCluster, num_restarts: int) -> list[float]:
    seconds = []
    for _ in range(num_restarts):
        begun_s = time.perf_counter()
        os.kill(cluster.pids()["w0"], signal.SIGKILL)
        _wait(cluster, RankReady, 1)
        seconds.append(time.perf_counter() - begun_s)
    return seconds


def _idle_percent(cluster: RankCluster, seconds: float = 3.0) -> float:
    """Processor time of this process and of the ranks' while nothing is asked of them, in percent of a core."""
    pids = [os.getpid(), *cluster.pids().values()]
    before_s = [_processor_s(pid) for pid in pids]
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        cluster.poll(0.5)
    after_s = [_processor_s(pid) for pid in pids]
    return 100 * (sum(after_s) - sum(before_s)) / seconds


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait(cluster: RankCluster, kind: type[Event], num_events: int) -> None:
    while num_events > 0:
        num_events -= sum(isinstance(event, kind) for event in cluster.poll(30.0))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    raise SystemExit(main())
