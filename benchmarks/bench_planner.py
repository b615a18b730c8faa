"""How exact planner and simulator are, how well a budget covers, and how long a large plan and a long day take.

python -m benchmarks.bench_planner                     # everything but the day, one kept result
python -m benchmarks.bench_planner --day-trace FILE    # the day too
python -m benchmarks.bench_planner --only plan         # accuracy | coverage | plan | modes | day, nothing kept

The simulator's parts, `modes` and `day`, are in `simulator_modes.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.planning.simulator_modes import DAY, RATES_RPS, compare_modes, run_day
from benchmarks.planning.workload import random_loads, write_composed_day
from benchmarks.report import Report
from crosspool.planner.demand import along_path, mean_bytes, snapshots, variance_bytes
from crosspool.planner.plan import read_plan
from crosspool.planner.pool_demand import estimate_pool

SEED = 7
NUM_WORKLOADS = 10
NUM_SNAPSHOTS = 600_000
RESIDENCES = 20_000
MOMENTS = 400_000
NUM_MODELS, TOTAL_RPS = 300, 10.0


def accuracy(report: Report) -> None:
    """Mean and variance of K_pool of ten random workloads of three models, against the closed forms."""
    mean_errors, variance_errors = [], []
    for workload in range(NUM_WORKLOADS):
        loads = random_loads(SEED + workload)
        pool = np.zeros(NUM_SNAPSHOTS)
        for idx, load in enumerate(loads):
            pool += snapshots(load, np.random.default_rng([SEED, workload, idx]), NUM_SNAPSHOTS).exact
        mean, variance = sum(map(mean_bytes, loads)), sum(map(variance_bytes, loads))
        mean_errors.append(abs(float(pool.mean()) / mean - 1) * 100)
        variance_errors.append(abs(float(pool.var()) / variance - 1) * 100)
    note = f"largest of {NUM_WORKLOADS} random workloads of 3 models, {NUM_SNAPSHOTS:,} snapshots each"
    report.metric("mean_error_percent.max", max(mean_errors), limit=0.5, note=f"{note}; limit: asked for")
    report.metric("variance_error_percent.max", max(variance_errors), limit=2.0, note=f"{note}; limit: asked for")


def coverage(report: Report) -> None:
    """Share of time above the P95 and P99 budgets along fresh paths, against 5 % and 1 %."""
    worst = 0.0
    for workload in range(3):
        loads = random_loads(SEED + workload)
        stay = max(load.requests.mean_service_s for load in loads)
        moments = np.linspace(0.0, RESIDENCES * stay, MOMENTS)
        pool = np.zeros(MOMENTS)
        for idx, load in enumerate(loads):
            pool += along_path(load, np.random.default_rng([SEED, 99, workload, idx]), moments).paged
        for quantile in (0.95, 0.99):
            budget = estimate_pool(loads, quantile=quantile, precision=0.005, seed=SEED).paged.value
            above = float((pool > budget).mean()) * 100
            worst = max(worst, abs(above - (1 - quantile) * 100))
    note = f"largest of 3 workloads at P95 and P99 over {RESIDENCES:,} residence times of the slowest model"
    report.metric("coverage_error_points.stationary", worst, limit=1.0, note=f"{note}; limit: asked for")


def large_plan(report: Report) -> None:
    """`crosspool plan` on 300 models, a day of windows, 10 requests/s, P99 to 1 %: wall time and peak memory."""
    with tempfile.TemporaryDirectory() as name:
        source = write_composed_day(Path(name), NUM_MODELS, TOTAL_RPS, SEED)
        output = Path(name) / "plan.json"
        command = [sys.executable, "-m", "crosspool", "plan", str(source), "--json", "--output", str(output)]
        started = time.perf_counter()
        done = subprocess.run(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(done.stderr)
        group = read_plan(output).groups[0]
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    half_width = (group.required_high_bytes - group.required_low_bytes) / 2 / group.required_bytes
    report.metric("plan_seconds.300x24h", seconds, limit=60.0, note="the whole command; limit: asked for on 2 cores")
    report.metric("plan_rss_mib.300x24h", peak_kib / 1024, limit=2048.0, note="peak of the process; limit: asked for")
    report.metric("plan_half_width_percent.300x24h", half_width * 100, limit=1.0, note="95 % interval of P99")
    report.metric("plan_effective_samples.300x24h", group.effective_samples)
    report.metric("pooling_gain.300x24h", group.pooling_gain, note="sum of 300 P99 over P99 of the sum")


def parts(arguments: argparse.Namespace) -> dict[str, Callable[[Report], None]]:
    """In the order they run; the day, which takes longest, only with a trace of one."""
    chosen: dict[str, Callable[[Report], None]] = {
        "accuracy": accuracy,
        "coverage": coverage,
        "plan": large_plan,
        "modes": partial(compare_modes, seconds=arguments.seconds),
    }
    if arguments.day_trace is not None:
        chosen["day"] = partial(run_day, trace=arguments.day_trace)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("accuracy", "coverage", "plan", "modes", "day")
    parser.add_argument("--only", choices=names, help="run one part and keep nothing")
    parser.add_argument("--day-trace", type=Path, help="CSV of arrival_s,model,prompt_tokens,output_tokens over a day")
    parser.add_argument("--seconds", type=float, default=30.0, help="arrivals of each comparison of the modes")
    arguments = parser.parse_args()
    if arguments.day_trace is not None and not arguments.day_trace.is_file():
        parser.error(f"--day-trace {arguments.day_trace} is no file")
    if arguments.only == "day" and arguments.day_trace is None:
        parser.error("--only day needs --day-trace FILE")
    report = Report(
        "planner",
        hardware="cpu",
        config={
            "plan": {"models": NUM_MODELS, "requests_per_s": TOTAL_RPS, "quantile": 0.99, "precision": 0.01},
            "modes": {"rates_rps": RATES_RPS, "seconds": arguments.seconds},
            "day": DAY if arguments.day_trace is not None else None,
        },
        seed=SEED,
        summary=(
            "The planner against closed forms, its budget along fresh paths, and one large plan; the simulator's two "
            "modes against each other, and a day in it. The day of 300 models is composed by the benchmark (Zipf "
            "popularity, silent windows, Gamma bursts), not recorded; all of them are small enough for one node, and "
            "their speed is told (10 ms a token), not simulated. Simulated durations are the roofline's: what is "
            "measured of the simulator is the simulator, not the system."
        ),
    )
    for name, part in parts(arguments).items():
        if arguments.only in (None, name):
            print(f"{name} ...", file=sys.stderr, flush=True)
            part(report)
    if arguments.only is None:
        print("\n".join(map(str, report.write())))
    print(json.dumps(report.metrics, indent=2))


if __name__ == "__main__":
    main()
