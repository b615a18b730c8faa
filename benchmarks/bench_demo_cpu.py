"""The product on a CPU: decode against transformers, the cost of an idle server, and the demo from a fresh clone.

    python -m benchmarks.bench_demo_cpu            # needs torch and transformers beside the `test` extra
    python -m benchmarks.bench_demo_cpu --skip-clone

decode_ratio_vs_transformers: the engine's API on the three demo models in two processes, greedy, 128 tokens; `b1` one
request, `c8` eight over three models against transformers one after another (`.inprocess`: both pools in one thread).
As in bench_numpy_decode the engine has a decode lane for each model and hands out runs of up to 16 steps.
idle_cpu_percent: of one core, the whole process tree of `crosspool serve` without traffic.
demo_seconds: `git clone` of the last commit, then `make demo` with plain pip, installation included.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.bench_numpy_decode import LAYOUTS, SEED, measure
from benchmarks.report import ROOT, Report
from crosspool.demo.scenario import demo_model_dirs
from crosspool.pools_config import HostLayout

READY_TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds of decode, after one of warm-up")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads; NumPy runs one a pool")
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--skip-clone", action="store_true", help="leave out demo_seconds")
    args = parser.parse_args()
    report = Report("demo", hardware="cpu", config=vars(args), seed=SEED)
    directories = list(demo_model_dirs().values())
    for layout in LAYOUTS:
        percent = idle_cpu_percent(directories, layout, args.idle_seconds)
        report.metric(f"idle_cpu_percent.{layout}", percent, note="of one core; asked: below 2")
    if not args.skip_clone:
        report.metric("demo_seconds", demo_seconds(), note="clone, installation and demo; asked: below 120")
    measure(report, directories, num_tokens=args.tokens, rounds=args.rounds, threads=args.threads)
    for name, asked in (("b1", 4), ("c8", 8)):
        ratio = report.metrics[f"decode_ratio_vs_transformers.{name}.processes"]
        report.metric(f"decode_ratio_vs_transformers.{name}", ratio, note=f"two processes; asked: at least {asked}")
    print(report.as_markdown())
    report.write()
    return 0


def idle_cpu_percent(directories: list[Path], layout: HostLayout, seconds: float) -> float:
    """CPU time of the whole tree of an idle server over `seconds`, in percent of one core."""
    command = [sys.executable, "-m", "crosspool", "serve", *map(str, directories), "--layout", layout, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _wait_until_serving(server)
        time.sleep(2.0)
        tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        before = _cpu_seconds(tree)
        time.sleep(seconds)
        return 100.0 * (_cpu_seconds(tree) - before) / seconds
    finally:
        server.terminate()
        server.wait(timeout=30)


def demo_seconds() -> float:
    """A newcomer's first command, from `git clone` to the end of `make demo`."""
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        clone = Path(scratch) / "crosspool"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["make", "demo", "UV="], cwd=clone, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def _wait_until_serving(server: "subprocess.Popen[str]") -> None:
    assert server.stderr is not None
    deadline = time.monotonic() + READY_TIMEOUT_S
    for line in server.stderr:
        if "serving" in line and "http" in line:
            return
        if time.monotonic() > deadline:
            break
    raise RuntimeError(f"the server did not start: exit code {server.poll()}")


def _cpu_seconds(tree: list[psutil.Process]) -> float:
    return float(sum(times.user + times.system for times in (process.cpu_times() for process in tree)))


if __name__ == "__main__":
    sys.exit(main())
