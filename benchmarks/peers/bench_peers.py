"""Other engines under the load of `bench_layouts`: vLLM, vLLM with kvcached, SGLang; true shapes, dummy weights.

    python -m benchmarks.peers.bench_peers --dry-run                          # print the commands, start nothing
    python -m benchmarks.peers.bench_peers --peers vllm-static-2 --rates 0.8 --trace-dir TRACES

Runs where the engines are installed and two GPUs are there. kvcached needs its .pth file in a real site directory, and
`--pool-gib` of each GPU left free by a ballast. Results have the names of `bench_layouts`, so that both can stand in
one table.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from benchmarks.bench_layouts import bench_settings
from benchmarks.bench_layouts_gpu import VOCABULARY
from benchmarks.layouts.figures import add_load
from benchmarks.peers.instances import PEERS, Instance, PeerOptions, instances, write_peer_dir
from benchmarks.peers.spread_weights import write_plugin
from benchmarks.report import RESULTS, Report
from crosspool.bench.run import run
from crosspool.bench.settings import BenchSettings
from crosspool.errors import CrossPoolError
from crosspool.units import GiB

START_TIMEOUT_S = 900.0
PROGRAMS = {"vllm": "vLLM", "kvcached": "vLLM with kvcached", "sglang": "SGLang"}


class Running:
    """Processes that end with the block, the last started first."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stack = ExitStack()

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, command: Sequence[str], environment: dict[str, str], name: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self._log / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._stack.callback(_end, process)
        return process

    def wait_ready(self, instance: Instance, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                words = (self._log / f"{instance.model}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{instance.model} did not start: {words}")
            try:
                with urllib.request.urlopen(f"{instance.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(2.0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its workers, which are a session of their own."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, ending)
            process.wait(30)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def peer_settings(args: argparse.Namespace, urls: tuple[str, ...], models: Sequence[str], rate: str) -> BenchSettings:
    """The load that `bench_layouts_gpu` puts on our own layouts."""
    return replace(bench_settings(args, urls, models, rate), temperature=1.0, vocab_size=VOCABULARY)


def measure(args: argparse.Namespace, peer: str, started: Sequence[Instance], report: Report) -> None:
    """Every rate on one start of the engines."""
    for rate in args.rates:
        urls = tuple(f"{instance.model}={instance.url}" for instance in started)
        settings = peer_settings(args, urls, [instance.model for instance in started], rate)
        add_load(report, peer, rate, run(settings))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", nargs="+", default=["vllm-static-2"], choices=list(PEERS))
    parser.add_argument("--rates", nargs="+", default=["0.8"])
    parser.add_argument("--trace-dir", type=Path, help="folder of sharegpt_<rate>.jsonl")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument(
        "--tokens-per-step", nargs="+", type=int, default=[8192], help="a start of the engines for each"
    )
    parser.add_argument("--kv-gib", type=float, default=20.0, help="of each model on each GPU, with vLLM")
    parser.add_argument("--pool-gib", type=float, default=40.0, help="of each GPU, with kvcached")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--hardware", default="h200-x2")
    parser.add_argument("--log-dir", type=Path, default=Path("peer_logs"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="print the commands and start nothing")
    args = parser.parse_args()
    args.length_scale = 1.0
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        plugin = write_plugin(Path(folder) / "plugin")
        for peer in args.peers:
            paths = {"out": None, "log_dir": None, "trace_dir": args.trace_dir and args.trace_dir.name}
            config = {**vars(args), **paths, "peer": peer}
            report = Report(f"peers-{peer}", hardware=args.hardware, config=config, seed=args.seed)
            for tokens in args.tokens_per_step:
                options = PeerOptions(
                    tokens_per_step=tokens, kv_bytes=int(args.kv_gib * GiB), max_model_len=args.max_model_len
                )
                try:
                    wanted = instances(peer, Path(folder), plugin, options)
                    run_peer(args, peer, peer_name(peer, tokens), wanted, Path(folder), report)
                except (CrossPoolError, RuntimeError, ValueError, OSError) as failure:
                    failed.append(peer_name(peer, tokens))
                    print(f"{failed[-1]}: FAILED: {failure}", flush=True)
                write_report(report, peer, args.out)
    return 1 if failed else 0


def peer_name(peer: str, tokens_per_step: int) -> str:
    """In metrics: with its tokens a step where that is not the usual number."""
    return peer if tokens_per_step == PeerOptions().tokens_per_step else f"{peer}.{tokens_per_step}"


def is_installed(engine: str) -> bool:
    """kvcached is a package that vLLM loads."""
    if engine == "sglang":
        return find_spec("sglang") is not None
    return shutil.which("vllm") is not None and (engine == "vllm" or find_spec("kvcached") is not None)


def write_report(report: Report, peer: str, directory: Path) -> None:
    """Nothing where nothing ran."""
    if report.metrics:
        is_spread = PEERS[peer][0] != "sglang"
        routing = (
            "spread by the plugin" if is_spread else "NOT spread: its routers may use few experts, which flatters it"
        )
        report.summary = f"{peer}: dummy weights of the true shapes, {routing}, through crosspool bench."
        for path in report.write(directory):
            print(path)


def run_peer(
    args: argparse.Namespace, peer: str, name: str, wanted: Sequence[Instance], folder: Path, report: Report
) -> None:
    """One start of the engines, with figures under `name`."""
    engine, placement = PEERS[peer]
    gpus = sorted({gpu for own in placement.values() for gpu in own}) if engine == "kvcached" else []
    ballasts = [
        (sys.executable, "-m", "benchmarks.peers.ballast", "--gpu", str(gpu), "--leave-gib", str(args.pool_gib))
        for gpu in gpus
    ]
    if args.dry_run:
        for instance in wanted:
            words = [f"{name}={value}" for name, value in instance.environment.items()]
            print(shlex.join([*words, *instance.command]))
        for ballast in ballasts:
            print(shlex.join(ballast))
        return
    if not is_installed(engine):
        raise RuntimeError(f"{PROGRAMS[engine]} is not installed here; install it, or look with --dry-run")
    args.log_dir.mkdir(parents=True, exist_ok=True)
    with Running(args.log_dir) as running:
        for instance in wanted:  # one after another: each measures how much memory is free
            write_peer_dir(folder, instance.model)
            process = running.start(instance.command, dict(instance.environment), instance.model)
            running.wait_ready(instance, process)
        for number, ballast in enumerate(ballasts):
            running.start(ballast, {}, f"ballast{number}")
        time.sleep(10.0 if ballasts else 0.0)
        measure(args, name, wanted, report)


if __name__ == "__main__":
    raise SystemExit(main())
