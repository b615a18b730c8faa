"""Do accepted requests survive when a rank is killed or stopped on GPUs, and how soon is every model served again?

    python -m benchmarks.bench_recovery [--models a,b] [--layers N] [--gpus 1|2] [--faults w0:SIGKILL,kv0:SIGSTOP]
        [--backend numpy --prefill dedicated --parent DIRECTORY]
        [--batch-invariant]
        [--requests 18] [--max-tokens 24] [--quiet-s 3] [--minutes 0] [--parent DIRECTORY_WITH_CHECKPOINTS]
        [--leave 0.2] [--pause-s 0.5]

Engine, cluster and CUDA workers without HTTP; random weights of the models' true shapes, or checkpoints. First every
request runs undisturbed, greedy, then a third of them again (other batches, no fault: the control), then all of them
over and over while ranks are lost: some clients pause before they ask, and some leave in the middle. A token that
differs is a tie if the model, asked undisturbed at that place, gives both tokens nearly the same log-probability;
kernels of other batch sizes round differently, so ties fall either way. With one GPU both pools share it, which shows
failures and not speed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.full_models import CONFIGS, write_model_dir
from benchmarks.judges.judged_traffic import TIE_NATS, Answer, Traffic, Verdict, judge, plans
from benchmarks.report import RESULTS, Report
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.rank_cluster import RankCluster
from crosspool.cluster.start import start_cluster
from crosspool.cluster.supervisor import RankState
from crosspool.config import PREFILL_TOKENS, DeploymentConfig, ModelConfig, SchedulingConfig
from crosspool.deployment.engine_and_cluster import cluster_config, engine_config
from crosspool.deployment.launch import load_models
from crosspool.deployment.prepared_model import prepare_models
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.engine import Engine
from crosspool.pools_config import PoolsConfig, Prefill
from crosspool.units import GiB

PROMPTS = "20,700,30,3000,28,1500"
FAULTS = "w0:SIGKILL,kv0:SIGKILL,w0:SIGSTOP,kv0:SIGSTOP"


async def break_rank(
    cluster: RankCluster, traffic: Traffic, rank: str, kind: str, bound_s: float
) -> tuple[float, float]:
    """Signal the rank's process; (seconds until it is noticed, until every model has given a token again)."""
    begin, noticed = time.perf_counter(), 0.0
    os.kill(cluster.pids()[rank], getattr(signal, kind))
    names = set(traffic.last_token)
    while time.perf_counter() - begin < bound_s:
        await asyncio.sleep(0.02)
        state = cluster.states()[rank]
        if not noticed and state is not RankState.READY:
            noticed = time.perf_counter()
        if noticed and state is RankState.READY:
            break
    ready = time.perf_counter()
    while time.perf_counter() - begin < bound_s and not all(traffic.last_token[name] > ready for name in names):
        await asyncio.sleep(0.02)
    return noticed - begin if noticed else float("nan"), time.perf_counter() - begin


async def with_faults(
    cluster: RankCluster, traffic: Traffic, expected: Sequence[Answer], report: Report, options: argparse.Namespace
) -> None:
    found: list[tuple[int, Answer]] = []
    is_over, number, chance = False, 0, random.Random(7)

    async def worker() -> None:
        nonlocal number
        while not is_over:
            index, number = number % len(expected), number + 1
            await asyncio.sleep(chance.uniform(0, options.pause_s))
            plan, leaves = expected[index].plan, chance.random() < options.leave
            leaves_after = chance.randint(1, plan.max_tokens - 1) if leaves else None
            found.append((index, (await traffic.ask(plan, leaves_after=leaves_after))[0]))
            if found[-1][1].error:
                await asyncio.sleep(0.2)

    workers = [asyncio.create_task(worker()) for _ in range(options.at_once)]
    times: dict[str, list[float]] = {}
    until = time.perf_counter() + 60 * options.minutes
    faults = [tuple(fault.split(":")) for fault in options.faults.split(",") if fault]
    while True:
        for rank, kind in faults:
            await asyncio.sleep(options.quiet_s)
            noticed_s, seconds = await break_rank(cluster, traffic, rank, kind, options.bound_s)
            times.setdefault(f"{rank}.{kind.lower()}", []).append(seconds)
            print(f"  {kind} of {rank}: noticed after {noticed_s:.2f} s, all served after {seconds:.1f} s", flush=True)
        if time.perf_counter() >= until:
            break
    await asyncio.sleep(options.quiet_s)
    is_over = True
    await asyncio.gather(*workers)
    for name, seconds_of in times.items():
        worst, note = max(seconds_of), f"the worst of {len(seconds_of)}; the target"
        report.metric(f"recovery_s.{name}", worst, limit=options.target_s, note=note)
    verdict = await judge(traffic, [(expected[index], answer) for index, answer in found if not answer.has_left])
    tell("faults", verdict, report)
    left = [(expected[index], answer) for index, answer in found if answer.has_left]
    parted = [(whole, part) for whole, part in left if part.token_ids != whole.token_ids[: len(part.token_ids)]]
    ties, same = sum([await traffic.is_tie(*pair) for pair in parted]), len(left) - len(parted)
    report.metric("faults_left_same_tokens", same, limit=len(left), note="of clients that left, as far as they stayed")
    report.metric("faults_left_same_but_ties", same + ties, limit=len(left), note=f"{TIE_NATS} nats")
    errors = {answer.error[:160] for _, answer in found if answer.error}
    print(
        f"with faults: {verdict}; {same} and {ties} ties of {len(left)} that left; errors {sorted(errors)[:5]}",
        flush=True,
    )
    stats = traffic.engine.stats()
    frames = {pool.kv_rank: (pool.frames_used, pool.frames_reserved) for pool in stats.pools}
    print(f"replays {stats.num_replays}, ranks lost {stats.num_ranks_lost}, frames left {frames}", flush=True)
    report.metric("replays", stats.num_replays)
    report.metric("ranks_lost", stats.num_ranks_lost, limit=sum(map(len, times.values())), note="faults made")
    report.metric(
        "frames_left", sum(sum(each) for each in frames.values()), limit=0, note="used or promised at the end"
    )


def tell(name: str, verdict: Verdict, report: Report) -> None:
    report.metric(f"{name}_requests", verdict.num)
    report.metric(f"{name}_whole", verdict.whole, limit=verdict.num, note="no error, every token")
    report.metric(f"{name}_same_tokens", verdict.same, limit=verdict.num, note="as the undisturbed run's")
    report.metric(f"{name}_same_but_ties", verdict.same + verdict.ties, limit=verdict.num, note=f"{TIE_NATS} nats")


def deployment(options: argparse.Namespace, prefill: Prefill = "inline") -> DeploymentConfig:
    """The models of the command line in two pools, without a prefix cache, which would hide repeated prompts."""
    return DeploymentConfig(
        models=tuple(ModelConfig(source=str(path)) for path in model_dirs(options.models.split(","), options)),
        pools=PoolsConfig(
            backend=options.backend,
            weights="random" if options.parent is None else "checkpoint",
            kv_pool_bytes=int(options.kv_gib * GiB),
            prefill=prefill,
        ),
        scheduling=SchedulingConfig(
            max_num_batched_tokens=PREFILL_TOKENS[options.backend],
            enable_prefix_caching=False,
            batch_invariant=options.batch_invariant,
        ),
    )


def driven(config: DeploymentConfig, options: argparse.Namespace) -> DeploymentConfig:
    """The same with what drives decode as on the command line."""
    pools = replace(config.pools, control=options.control, steps_ahead=options.steps_ahead)
    return replace(config, pools=pools, scheduling=replace(config.scheduling, decode_steps=options.decode_steps))


def on_gpus(config: DeploymentConfig, num_gpus: int) -> ClusterConfig:
    """Its cluster, all ranks in processes of their own on one GPU where there is only that."""
    cluster = cluster_config(config)
    return replace(cluster, devices=tuple((rank, 0) for rank in cluster.ranks)) if num_gpus == 1 else cluster


async def run(options: argparse.Namespace) -> None:
    names = options.models.split(",")
    config = driven(deployment(options, options.prefill), options)
    clustered = on_gpus(config, options.gpus)
    layout = "one GPU for both pools" if options.gpus == 1 else "one GPU for each pool"
    hardware = "h200" if options.gpus == 1 else f"h200-x{options.gpus}"
    if options.backend == "numpy":
        layout, hardware = "NumPy backend", "cpu"
    shape = {
        "models": names,
        "layers": options.layers,
        "prefill": options.prefill,
        "batch_invariant": options.batch_invariant,
        "control": config.pools.driven_by,
        "decode_steps": options.decode_steps,
        "steps_ahead": options.steps_ahead,
        "leave": options.leave,
        "pause_s": options.pause_s,
    }
    report = Report(options.name, hardware=hardware, config=shape, seed=7)
    report.summary = f"Ranks lost under traffic, {layout}; " + (
        "random weights, made anew on the device." if options.parent is None else "checkpoints in the page cache."
    )
    cluster = start_cluster(clustered)
    engine = AsyncEngine(Engine(engine_config(config), cluster).start())
    try:
        begin = time.perf_counter()
        await load_models(engine, prepare_models(config))
        report.metric("ready_s", time.perf_counter() - begin, note="processes, GPUs, weights, captures")
        print(f"ready after {time.perf_counter() - begin:.1f} s; {cluster.memory_bytes()}", flush=True)
        traffic, requests = (
            Traffic(engine),
            plans(
                names,
                [int(size) for size in options.prompts.split(",")],
                options.vocab,
                options.requests,
                options.max_tokens,
            ),
        )
        begin = time.perf_counter()
        expected = await traffic.ask_all(requests, options.at_once)
        print(f"undisturbed: {len(expected)} in {time.perf_counter() - begin:.1f} s, errors "
              f"{[answer.error for answer in expected if answer.error][:3]}", flush=True)  # fmt: skip
        again = await traffic.ask_all(requests[: max(1, len(requests) // 3)], options.at_once)
        control = await judge(traffic, list(zip(expected, again, strict=False)))
        tell("control", control, report)
        print(f"control: {control}", flush=True)
        await with_faults(cluster, traffic, expected, report, options)
    finally:
        await engine.close()
        if len(report.metrics) > 1:
            report.write(options.out)


def model_dirs(names: Sequence[str], options: argparse.Namespace) -> list[Path]:
    if options.parent is not None:
        return [options.parent / name for name in names]
    for name in names:
        if options.layers:
            CONFIGS[name]["num_hidden_layers"] = options.layers
    directory = Path(tempfile.mkdtemp())
    return [write_model_dir(directory, name) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--parent", type=Path, help="directory that holds the models' directories, with weights")
    parser.add_argument("--layers", type=int, default=0, help="of every model; 0: all")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--kv-gib", type=float, default=20)
    parser.add_argument("--faults", default=FAULTS)
    parser.add_argument("--minutes", type=float, default=0.0, help="repeat the faults this long")
    parser.add_argument("--requests", type=int, default=18)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=9)
    parser.add_argument("--prompts", default=PROMPTS, help="tokens")
    parser.add_argument("--vocab", type=int, default=100_000, help="ids of prompts are below")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--prefill", default="inline")
    parser.add_argument("--batch-invariant", action="store_true", help="as of `crosspool serve`")
    parser.add_argument(
        "--control", choices=("host", "graphs", "resident"), default=None, help="as of `crosspool serve`"
    )
    parser.add_argument("--decode-steps", type=int, default=1, help="as of `crosspool serve`")
    parser.add_argument("--steps-ahead", choices=("host", "device"), default="host", help="as of `crosspool serve`")
    parser.add_argument("--name", default="recovery", help="of the result")
    parser.add_argument("--leave", type=float, default=0.0, help="part of the clients that leave in the middle")
    parser.add_argument("--pause-s", type=float, default=0.0, help="longest pause of a client between two requests")
    parser.add_argument("--quiet-s", type=float, default=3.0, help="between a recovery and the next fault")
    parser.add_argument("--bound-s", type=float, default=75.0)
    parser.add_argument("--target-s", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
