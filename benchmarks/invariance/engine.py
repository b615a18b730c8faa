"""Whether one prompt's greedy tokens depend on what runs beside it, through engine, ranks and scheduler."""

from __future__ import annotations

import argparse
import asyncio
import time

import numpy as np

from benchmarks.bench_recovery import deployment, on_gpus
from benchmarks.judges.judged_traffic import Answer, Plan, Traffic
from benchmarks.report import Report
from crosspool.cluster.start import start_cluster
from crosspool.deployment.engine_and_cluster import engine_config
from crosspool.deployment.launch import load_models
from crosspool.deployment.prepared_model import prepare_models
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.engine import Engine

BATCHES = (2, 4, 8)


def place_of_difference(expected: Answer, found: Answer) -> int:
    """The first token that differs; -1: none."""
    pairs = zip(expected.token_ids, found.token_ids, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), -1)


async def answers(report: Report, options: argparse.Namespace) -> None:
    names = options.models.split(",")
    config = deployment(options)
    running = AsyncEngine(Engine(engine_config(config), start_cluster(on_gpus(config, options.gpus))).start())
    try:
        await load_models(running, prepare_models(config))
        traffic = Traffic(running)
        for name in names:
            for size in map(int, options.prompts.split(",")):
                await compare(report, traffic, name, size, options)
            await prompts_together(report, traffic, name, options)
    finally:
        await running.close()


async def prompts_together(report: Report, traffic: Traffic, name: str, options: argparse.Namespace) -> None:
    """When the first tokens of prompts that come at once are there: what prompts that run alone cost."""
    rng = np.random.default_rng(3)
    for size in (60, 600):
        for _ in range(2):  # the first time is a warm-up
            plans = [Plan(name, tuple(rng.integers(1, options.vocab, size=size).tolist()), 2) for _ in range(8)]
            begin = time.perf_counter()
            answers = await traffic.ask_all(plans, len(plans))
        times = sorted(1e3 * (answer.moments[0] - begin) for answer in answers)
        label = f"{name}.8_prompts_of_{size}"
        report.metric(f"ttft_ms_at_once.{label}.mean", float(np.mean(times)))
        report.metric(f"ttft_ms_at_once.{label}.last", times[-1])
        print(f"{label} at once: first tokens after {times[0]:.1f} to {times[-1]:.1f} ms", flush=True)


async def compare(report: Report, traffic: Traffic, name: str, size: int, options: argparse.Namespace) -> None:
    """One prompt of `size` tokens under every circumstance."""
    rng = np.random.default_rng(size)

    def plan(length: int, max_tokens: int) -> Plan:
        return Plan(name, tuple(rng.integers(1, options.vocab, size=length).tolist()), max_tokens)

    target = plan(size, options.tokens)
    alone, _ = await traffic.ask(target)

    async def decoding(others: int) -> Answer:
        tasks = [asyncio.create_task(traffic.ask(plan(40 + 30 * each, 4 * options.tokens))) for each in range(others)]
        await asyncio.sleep(options.settle_s)
        answer, _ = await traffic.ask(target)
        await asyncio.gather(*tasks)
        return answer

    async def at_once(others: int) -> Answer:
        tasks = [asyncio.create_task(traffic.ask(plan(100 + 211 * each, 8))) for each in range(others)]
        answer, _ = await traffic.ask(target)
        await asyncio.gather(*tasks)
        return answer

    async def beside_chunk() -> Answer:
        task = asyncio.create_task(traffic.ask(target))
        await asyncio.sleep(options.settle_s / 8)
        other = asyncio.create_task(traffic.ask(plan(options.long, 4)))
        answer, _ = await task
        await other
        return answer

    found = {"again": (await traffic.ask(target))[0]}
    for batch in BATCHES:
        found[f"decode.b{batch}"] = await decoding(batch - 1)
    for batch in BATCHES:
        found[f"prompts.b{batch}"] = await at_once(batch - 1)
    found["beside_chunk"] = await beside_chunk()
    for case, answer in found.items():
        place = place_of_difference(alone, answer)
        is_same = not answer.error and place < 0 and len(answer.token_ids) == target.max_tokens
        report.metric(f"same_answer.{name}.{size}.{case}", float(is_same), limit=1.0)
        said = "same" if is_same else answer.error or f"parts at token {place}"
        print(f"{name}, prompt of {size}, {case}: {said}", flush=True)
