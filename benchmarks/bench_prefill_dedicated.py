"""Prompts in the pools against prompts on a GPU of their own: first tokens, and tokens of neighbours meanwhile.

    python -m benchmarks.bench_prefill_dedicated [--arms inline,one-place,two-places] [--parts alone,turns,beside,load]
        [--gpus 1]

The same GPUs in all arms. Two: inline, KV rank and weights rank have one each, and prompts run in both; in the others
both ranks are on the first, and a prefill rank has the second, with room for one model or for two: in one place two
take turns. One: all ranks share it, so that nothing but the ways of prompts differs between the arms. Three: a GPU for
each rank.
Whole models with random weights behind the whole engine, without HTTP. Limits of first tokens are the operations of a
prompt's products at the measured rate of a large one; of a switch, the model's bytes over the bus.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.bench_prefill import PRODUCT_TFLOPS, gaps_ms, prompt_flops
from benchmarks.full_models import full_spec, write_model_dir
from benchmarks.report import RESULTS, Report
from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig
from crosspool.core import SamplingParams
from crosspool.deployment.launch import start_engine
from crosspool.deployment.prepared_model import prepare_models
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.request import GenerationRequest
from crosspool.models.whole_size import whole_bytes
from crosspool.pools_config import PoolsConfig
from crosspool.units import GiB

BUS_GB_PER_S = 55.0
"""From pinned host memory, probed."""

ARMS = ("inline", "one-place", "two-places")
PARTS = ("alone", "turns", "beside", "load")

SUMMARIES = {
    1: "One GPU in all arms, models with random weights, no HTTP: KV rank, weights rank and prefill rank share it, and "
    "prompts keep to their share of the multiprocessors beside decode. inline: prompts run in the pools. In the other "
    "arms a prefill rank on the same GPU has room for one model (each change of model brings in the other one from "
    "pinned host memory, a layer at a time under the first chunk) or for two. No GPU is won by it: this shows what a "
    "switch costs, and that with room for both none is left.",
    2: "Two GPUs in all arms, whole models with random weights, no HTTP. inline: KV rank on one GPU, weights rank on "
    "the other. In the other arms both are on the first GPU, and a prefill rank on the second has room for one model "
    "(each change of model then brings in the other one from pinned host memory, a layer at a time under the first "
    "chunk) or for two. Three GPUs (pools keep one each, prompts have one) were not at hand: decode of these arms has "
    "one GPU in place of two; compare its time between tokens before and during a prompt, not across arms.",
    3: "Three GPUs: KV rank, weights rank and, but for inline, a prefill rank have one each; whole models with random "
    "weights, no HTTP. The prefill rank has room for one model or for two.",
}


class Traffic:
    """Sends requests to one engine and notes when their tokens come."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._rng = np.random.default_rng(7)
        self._count = 0

    async def run(self, model: str, prompt_tokens: int, max_tokens: int, moments: list[float]) -> float:
        """Milliseconds to the first token; moments: of all tokens, as they come."""
        self._count += 1
        request = GenerationRequest(
            request_id=str(self._count),
            model=model,
            prompt_token_ids=tuple(self._rng.integers(1, 100_000, size=prompt_tokens).tolist()),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        ttft_s = 0.0
        async for output in self.engine.generate(request):
            moments += [time.perf_counter()] * len(output.token_ids)
            if output.timings.ttft_s is not None:
                ttft_s = output.timings.ttft_s
        return ttft_s * 1e3

    async def first_token(self, model: str, prompt_tokens: int) -> float:
        return await self.run(model, prompt_tokens, 2, [])

    async def beside(
        self, model: str, prompt_tokens: int, neighbour: str, rows: int
    ) -> tuple[float, list[list[float]]]:
        """(milliseconds to the first token, those between tokens of `rows` sequences before and during the prompt)."""
        moments: list[list[float]] = [[] for _ in range(rows)]
        tasks = [
            asyncio.create_task(self.run(neighbour, 400 + 100 * row, 4000, own)) for row, own in enumerate(moments)
        ]
        while not all(len(own) > 20 for own in moments):
            await asyncio.sleep(0.05)
        quiet_s = time.perf_counter()
        await asyncio.sleep(0.5)
        begin = time.perf_counter()
        ttft = await self.first_token(model, prompt_tokens)
        end = time.perf_counter()
        for number in range(self._count - rows, self._count):
            self.engine.abort(str(number))
        await asyncio.gather(*tasks)
        before = [gap for own in moments for gap in gaps_ms(own, quiet_s, begin)]
        during = [gap for own in moments for gap in gaps_ms(own, begin, end)]
        return ttft, [before, during]

    async def load(self, models: Sequence[str], per_s: float, seconds: float) -> tuple[list[float], list[float]]:
        """(first tokens, between tokens), milliseconds: prompts of 500 to 4,000 tokens, answers of 48, Poisson."""
        rng, tasks, kept = random.Random(11), [], []
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            moments: list[float] = []
            kept.append(moments)
            tasks.append(asyncio.create_task(self.run(rng.choice(models), rng.randrange(500, 4000), 48, moments)))
            await asyncio.sleep(rng.expovariate(per_s))
        first = await asyncio.gather(*tasks)
        return list(first), [gap for moments in kept for gap in gaps_ms(moments, 0.0, float("inf"))]


def config_of(arm: str, options: argparse.Namespace, directory: Path) -> DeploymentConfig:
    names = options.models.split(",")
    pools = PoolsConfig(backend="cuda", weights="random", kv_pool_bytes=int(options.kv_gib * GiB))
    largest = max(whole_bytes(full_spec(name, options.layers)) for name in names)
    if arm != "inline":
        room = largest * ARMS.index(arm)
        pools = replace(pools, prefill="dedicated", prefill_pool_bytes=room)
    pools = replace(pools, num_gpus=min(options.gpus, 2 if arm == "inline" else 3))
    return DeploymentConfig(
        models=tuple(
            ModelConfig(source=str(write_model_dir(directory, name, options.layers)), name=name) for name in names
        ),
        pools=pools,
        scheduling=SchedulingConfig(max_num_batched_tokens=8192, enable_prefix_caching=False),
    )


async def measure(arm: str, options: argparse.Namespace, report: Report, directory: Path) -> None:
    names, begin = options.models.split(","), time.perf_counter()
    config = config_of(arm, options, directory)
    models = prepare_models(config)
    engine = start_engine(config, models)
    try:
        for model in models:
            await engine.add_model(model.served)
        report.metric(f"ready_s.{arm}", time.perf_counter() - begin, note="random weights drawn, kernels warmed up")
        print(f"{arm}: ready after {time.perf_counter() - begin:.1f} s; {engine.memory_bytes()}", flush=True)
        traffic = Traffic(engine)
        parts = options.parts.split(",")
        for name, neighbour in zip(names, [*names[1:], names[0]], strict=True):
            if "alone" in parts:
                await _alone(arm, name, traffic, options, report)
            if "beside" in parts:
                await _beside(arm, name, neighbour, traffic, options, report)
            report.write(options.out)  # what there is by now
        if "turns" in parts and arm != "inline":
            await _turns(arm, names, traffic, report, options)
        if "load" in parts:
            await _load(arm, names, traffic, options, report)
        print(f"{arm}: switches {engine.stats().prefill_switches}", flush=True)
    finally:
        await engine.close()


async def _load(arm: str, names: Sequence[str], traffic: Traffic, options: argparse.Namespace, report: Report) -> None:
    first, gaps = await traffic.load(names, options.per_s, options.seconds)
    note = f"{len(first)} requests, Poisson {options.per_s:g}/s, prompts of 500 to 4,000 tokens"
    report.samples(f"ttft_ms_under_load.{arm}", first, note=note)
    report.samples(f"tbt_ms_under_load.{arm}", gaps, note=note)
    print(f"{arm} load: ttft {np.percentile(first, [50, 99])}, tbt {np.percentile(gaps, [50, 99])}", flush=True)


async def _alone(arm: str, name: str, traffic: Traffic, options: argparse.Namespace, report: Report) -> None:
    for context in map(int, options.contexts.split(",")):
        await traffic.first_token(name, context)
        found = sorted([await traffic.first_token(name, context) for _ in range(options.repeats)])
        limit = sum(prompt_flops(full_spec(name, options.layers), context)) / PRODUCT_TFLOPS / 1e9
        note = f"products at {PRODUCT_TFLOPS:.0f} TFLOP/s on one GPU"
        report.metric(f"ttft_ms.{name}.{arm}.{context // 1024}k", found[len(found) // 2], limit=limit, note=note)
        print(f"{arm} {name} {context}: ttft {[round(each, 1) for each in found]}, limit {limit:.0f}", flush=True)


async def _turns(arm: str, names: Sequence[str], traffic: Traffic, report: Report, options: argparse.Namespace) -> None:
    """First tokens of prompts each of which comes after another model's: that is in its place, or beside it."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(2):
        for name in names:
            found[name].append(await traffic.first_token(name, 4096))
    for name, times in found.items():
        if arm == "one-place":
            limit = whole_bytes(full_spec(name, options.layers)) / BUS_GB_PER_S / 1e6
            report.metric(f"ttft_ms_after_switch.{name}.4k", min(times), limit=limit, note="its bytes over the bus")
        else:
            report.metric(f"ttft_ms_after_other.{name}.4k", min(times), note="both models are in place")
        print(f"{arm} after the other, {name}: ttft {[round(each) for each in times]}", flush=True)


async def _beside(
    arm: str, name: str, neighbour: str, traffic: Traffic, options: argparse.Namespace, report: Report
) -> None:
    await traffic.first_token(name, 512)  # in place
    for context in map(int, options.contexts.split(",")):
        ttft, (before, during) = await traffic.beside(name, context, neighbour, options.rows)
        label = f"{name}.{arm}.{context // 1024}k"
        report.metric(f"ttft_ms_beside_decode.{label}", ttft, note=f"{options.rows} rows of {neighbour} decode")
        report.metric(f"tbt_p50_ms_before_prefill.{neighbour}.{label}", float(np.median(before)))
        if during:
            p50, p99 = np.percentile(during, [50, 99])
            report.metric(f"tbt_p50_ms_during_prefill.{neighbour}.{label}", float(p50))
            report.metric(f"tbt_p99_ms_during_prefill.{neighbour}.{label}", float(p99), limit=10.0, note="the target")
        quantiles = np.percentile(during, [50, 99]).round(2).tolist() if during else []
        print(
            f"{label} beside {options.rows} rows of {neighbour}: ttft {ttft:.0f}; between tokens "
            f"{np.median(before):.2f} before, during {quantiles}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--models", default="qwen3-30b-a3b,deepseek-v2-lite")
    parser.add_argument("--gpus", type=int, choices=tuple(SUMMARIES), default=2)
    parser.add_argument("--layers", type=int, help="of each model; default: all")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--contexts", default="4096,32768")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--kv-gib", type=float, default=24)
    parser.add_argument("--per-s", type=float, default=4)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    config = {key: value for key, value in vars(options).items() if key != "out"}
    report = Report(
        "prefill_dedicated",
        hardware="h200" if options.gpus == 1 else f"h200-x{options.gpus}",
        config=config,
        seed=7,
        summary=SUMMARIES[options.gpus] + (f" The first {options.layers} layers of each." if options.layers else ""),
    )
    with tempfile.TemporaryDirectory() as directory:
        for arm in options.arms.split(","):
            try:
                asyncio.run(measure(arm, options, report, Path(directory)))
            finally:
                if report.metrics:
                    report.write(options.out)


if __name__ == "__main__":
    main()
