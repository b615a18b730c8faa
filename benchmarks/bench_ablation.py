"""What do resident control and the layer-wise pipeline bring, each alone and both together?

    python -m benchmarks.bench_ablation                      # three full-size models, random weights, 2 GPUs: all modes
    python -m benchmarks.bench_ablation --backend numpy      # the demo models on CPUs: the pipeline alone

One command, one machine: the same requests to the same kernels, once for each mode of MODES. `off`: the host launches
each half of a layer, one decode batch at a time. No HTTP. Prompts are short, so that decode alone is measured. Three
parts: one stream of each model by itself; saturation, `--streams` of each model at once, in a window in which all
decode; and Poisson arrivals at `--rate` requests/s of each model.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ranks.watched_load import UNSTEADY_TOKENS, Load, Stream, WatchedCPU, arrivals, window_rate
from benchmarks.report import RESULTS, Report
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.rank_cluster import RankCluster
from crosspool.cluster.start import start_cluster
from crosspool.config import DeploymentConfig, ModelConfig, Pipeline, SchedulingConfig
from crosspool.deployment.engine_and_cluster import cluster_config, engine_config
from crosspool.deployment.launch import load_models
from crosspool.deployment.prepared_model import demo_models, prepare_models
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.engine import Engine
from crosspool.pools_config import Control, PoolsConfig
from crosspool.units import GiB, MiB

MODES: dict[str, tuple[Control, Pipeline]] = {
    "off": ("host", "off"),
    "resident": ("resident", "off"),
    "pipeline": ("host", "on"),
    "both": ("resident", "on"),
    "graphs": ("graphs", "off"),
    "graphs_pipeline": ("graphs", "on"),
}
AHEAD = "_ahead"
"""Behind a mode's name: GPUs also get what is behind a lane's step before that has ended (`--steps-ahead device`)."""

PAPER = {"off": 55.42, "resident": 77.86, "pipeline": 60.83, "both": 111.40}
"""Its aggregate decode tokens/s at 0.5 requests/s of each model, on 5 x A100."""

LANE_TOKENS_PER_S = 400
CORE_LIMIT = 5.0


def deployment(options: argparse.Namespace, models: tuple[ModelConfig, ...], mode: str) -> DeploymentConfig:
    control, pipeline = MODES[mode.removesuffix(AHEAD)]
    is_cuda = options.backend == "cuda"
    pools = PoolsConfig(
        backend=options.backend,
        weights="random" if is_cuda else "checkpoint",
        control=control,
        steps_ahead="device" if mode.endswith(AHEAD) else "host",
        order=options.order,
        kv_pool_bytes=options.kv_gib * GiB if is_cuda else 64 * MiB,
    )
    scheduling = SchedulingConfig(
        num_decode_lanes=1 if pipeline == "off" else options.lanes,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=2048 if is_cuda else 512,
        decode_steps=1 if control == "host" else options.decode_steps,
    )
    return DeploymentConfig(models=models, pools=pools, scheduling=scheduling)


def cluster_of(config: DeploymentConfig, options: argparse.Namespace) -> ClusterConfig:
    cluster = cluster_config(config)
    if options.one_gpu:
        return replace(cluster, devices=tuple((rank, 0) for rank in cluster.ranks))
    return cluster


async def measure(
    options: argparse.Namespace, models: tuple[ModelConfig, ...], mode: str, report: Report, alone: dict[str, list[int]]
) -> None:
    """One mode. alone: each model's lone answer in the first mode, which later ones are compared with."""
    config = deployment(options, models, mode)
    cluster = start_cluster(cluster_of(config, options))
    assert isinstance(cluster, RankCluster)
    engine = AsyncEngine(Engine(engine_config(config), cluster).start())
    try:
        begin_s = time.perf_counter()
        await load_models(engine, prepare_models(config))
        names, load = [model.served_name for model in models], Load(engine)
        print(f"{mode}: ready after {time.perf_counter() - begin_s:.1f} s", flush=True)
        await load.together(names * options.streams, 24)
        await load.together(names * options.streams, 24)
        pids = dict(sorted(cluster.pids().items()))
        for name in names:
            await load.together([name], 3 * options.decode_steps)  # its first run is captured
            used = WatchedCPU(pids)
            stream = await load.ask(Stream(name), options.alone_tokens, used)
            rate, _, _ = window_rate([stream])
            alone.setdefault(name, stream.tokens)
            same = sum(a == b for a, b in zip(alone[name], stream.tokens, strict=True))
            report.metric(f"same_tokens.{mode}.{name}", same, limit=options.alone_tokens, note="as in the first mode")
            report.metric(f"step_ms.{mode}.{name}", 1e3 / rate, note="one stream, time between tokens")
            by_rank = used.us_per_token
            share = sum(by_rank.values()) * LANE_TOKENS_PER_S / 1e4
            note = f"both ranks, at {LANE_TOKENS_PER_S} tokens/s"
            report.metric(f"host_core_percent.lane.{mode}.{name}", share, limit=CORE_LIMIT, note=note)
            for rank, spent_us in by_rank.items():
                report.metric(f"host_us_per_token.{mode}.{name}.{rank}", spent_us)
            spent = ", ".join(f"{rank} {spent_us:.0f}" for rank, spent_us in by_rank.items())
            print(
                f"  {name} alone: {1e3 / rate:.3f} ms a token, us of host: {spent}, {100 * used.share:.1f} % of a core",
                flush=True,
            )
        used = WatchedCPU(pids)
        used.look()
        streams = await load.together(names * options.streams, options.tokens)
        used.look()
        rate, begin_s, end_s = window_rate(streams)
        report.metric(f"ablation_tokens_per_s.{mode}", rate, note="at saturation")
        report.metric(f"ablation_window_s.{mode}", end_s - begin_s)
        per_model = {
            name: sum(stream.tokens_between(begin_s, end_s) for stream in streams if stream.model == name)
            / (end_s - begin_s)
            for name in names
        }
        print(f"  saturation: {rate:.0f} tokens/s, {per_model}, {100 * used.share:.0f} % of a core", flush=True)
        report.metric(f"host_core_percent.saturation.{mode}", 100 * used.share, note="of all ranks")
        if options.seconds > 0:
            rate = await arrivals(load, names, options.rate, options.seconds, options.arrival_tokens, options.seed)
            report.metric(f"ablation_arrivals_tokens_per_s.{mode}", rate, note=f"paper: {PAPER.get(mode, '-')}")
            print(f"  arrivals: {rate:.0f} tokens/s while any is under way", flush=True)
    finally:
        await engine.close()


def add_gains(report: Report) -> None:
    for kind in ("ablation_tokens_per_s", "ablation_arrivals_tokens_per_s"):
        modes = [mode + more for mode in MODES for more in ("", AHEAD)]
        rates = {mode: report.metrics[f"{kind}.{mode}"] for mode in modes if f"{kind}.{mode}" in report.metrics}
        if "off" not in rates:
            continue
        prefix = "ablation_gain" if kind == "ablation_tokens_per_s" else "ablation_arrivals_gain"
        for mode, rate in rates.items():
            if mode not in ("off", "both"):
                report.metric(f"{prefix}.{mode}", rate / rates["off"], note="over off")
        if "both" in rates:
            report.metric(prefix, rates["both"] / rates["off"], note="both over off; the paper's is 2.01")


def modes_of(options: argparse.Namespace) -> list[str]:
    """Those of the command line that the backend knows. Raises SystemExit for a name that nobody knows."""
    wanted = [mode for mode in options.modes.split(",") if mode]
    unknown = [mode for mode in wanted if mode.removesuffix(AHEAD) not in MODES]
    if unknown:
        raise SystemExit(
            f"unknown mode {unknown[0]!r}: choose from {', '.join(MODES)}, each also with {AHEAD} behind it"
        )
    if options.backend == "numpy":
        return [mode for mode in wanted if mode in MODES and MODES[mode][0] == "host"]
    return wanted


def left_out(options: argparse.Namespace) -> list[str]:
    """Modes that were asked for and that the backend does not have."""
    return [mode for mode in options.modes.split(",") if mode and mode not in modes_of(options)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=("cuda", "numpy"), default="cuda")
    parser.add_argument("--models", default="", help="comma-separated; default: the three full-size or demo models")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--streams", type=int, default=2, help="of each model, at saturation")
    parser.add_argument("--tokens", type=int, default=600, help="of each stream, at saturation")
    parser.add_argument("--alone-tokens", type=int, default=400)
    parser.add_argument("--rate", type=float, default=0.5, help="requests/s of each model")
    parser.add_argument("--seconds", type=float, default=12.0, help="in which requests arrive; 0: no arrivals")
    parser.add_argument("--arrival-tokens", type=int, default=400, help="longest answer")
    parser.add_argument("--lanes", type=int, default=2, help="decode lanes with the pipeline on")
    parser.add_argument("--decode-steps", type=int, default=8, help="of a run, where the host does not drive")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--order", choices=("none", "ticket", "priority"), default=None)
    parser.add_argument("--kv-gib", type=int, default=8)
    parser.add_argument("--one-gpu", action="store_true", help="both ranks on GPU 0: shows that modes work, no more")
    parser.add_argument("--name", default="ablation", help="of the result")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.alone_tokens <= UNSTEADY_TOKENS:
        parser.error(f"--alone-tokens is {options.alone_tokens}; hosts are watched behind the first {UNSTEADY_TOKENS}")
    shown = {key: value for key, value in vars(options).items() if key != "out"}
    hardware = "cpu" if options.backend == "numpy" else "h200" if options.one_gpu else "h200-x2"
    report = Report(options.name, hardware=hardware, config=shown, seed=options.seed)
    if names := left_out(options):
        print(f"left out on NumPy ranks, which their hosts drive: {', '.join(names)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models, alone = chosen_models(options, Path(folder)), dict[str, list[int]]()
        for mode in modes_of(options):
            asyncio.run(measure(options, models, mode, report, alone))
            report.write(options.out)
    add_gains(report)
    report.summary = summary(options)
    report.write(options.out)
    print(report.as_markdown(), flush=True)


def chosen_models(options: argparse.Namespace, folder: Path) -> tuple[ModelConfig, ...]:
    if options.backend == "numpy":
        return demo_models()
    from benchmarks.full_models import CONFIGS, write_model_dir

    names = options.models.split(",") if options.models else list(CONFIGS)
    return tuple(ModelConfig(source=str(write_model_dir(folder, name))) for name in names)


def summary(options: argparse.Namespace) -> str:
    what: dict[str, Any] = {mode: MODES[mode.removesuffix(AHEAD)] for mode in modes_of(options)}
    text = f"Control and pipeline by mode: {what}; {options.streams} streams of each model at saturation."
    if options.backend == "numpy":
        names = ", ".join(left_out(options)) or "nothing"
        text += (
            " A dry run on CPUs: NumPy ranks are driven by their hosts, so only the pipeline can be switched (left "
            f"out: {names}); processes share this machine's cores, and no figure here says anything about GPUs."
        )
    return text


if __name__ == "__main__":
    main()
