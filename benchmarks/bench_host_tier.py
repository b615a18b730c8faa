"""What host memory behind the KV pool saves conversations that pause, and what it costs where nothing comes back.

    python -m benchmarks.bench_host_tier [--rounds N]

The demo models at the engine, in a pool that holds a part of all conversations. Conversations take turns, so that the
others have had the pool before the next question of each; then prompts that nobody asks again, each of which makes
others' pages go. Both with `host_pool_bytes` and without, side by side in rounds; answers have to be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from contextlib import AbstractAsyncContextManager
from itertools import count
from pathlib import Path

from benchmarks.ranks.engine_drive import engine_of, greedy_outputs
from benchmarks.report import Report
from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.deployment.model_source import DEMO_MODELS
from crosspool.deployment.prepared_model import demo_models
from crosspool.engine.async_engine import AsyncEngine
from crosspool.models.directory import read_model_dir
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB

SEED = 6
FRAME_BYTES = 64 * KiB
POOL_BYTES, HOST_BYTES = 5 * MiB, 256 * MiB
NUM_CONVERSATIONS, NUM_TURNS = 3, 3
"""Of each model."""

QUESTION_TOKENS, ANSWER_TOKENS = 240, 8
UNIQUE_TOKENS = 700

_number = count()


def _engine(host_bytes: int) -> AbstractAsyncContextManager[AsyncEngine]:
    return engine_of(
        DeploymentConfig(
            models=tuple(ModelConfig(source=model.source, page_tokens=64) for model in demo_models()),
            pools=PoolsConfig(kv_pool_bytes=POOL_BYTES, host_pool_bytes=host_bytes, frame_bytes=FRAME_BYTES),
        )
    )


async def _ask(engine: AsyncEngine, name: str, prompt: list[int]) -> tuple[list[int], float, int]:
    """The answer, milliseconds to its first token, and tokens of the prompt that were found."""
    outputs = await greedy_outputs(engine, name, prompt, ANSWER_TOKENS, f"r{next(_number)}")
    ttft_s, usage = outputs[-1].timings.ttft_s, outputs[-1].usage
    assert ttft_s is not None
    assert usage is not None
    return [token for output in outputs for token in output.token_ids], 1e3 * ttft_s, usage.cached_tokens


class Bench:
    """One engine's figures, by what was asked."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.ttft_ms: dict[str, list[float]] = {}
        self.found: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.answers: list[list[int]] = []

    async def ask(self, what: str, name: str, prompt: list[int], *, counts: bool) -> list[int]:
        answer, ttft_ms, found = await _ask(self.engine, name, prompt)
        self.answers.append(answer)
        if counts:
            self.ttft_ms.setdefault(what, []).append(ttft_ms)
            self.found[what] = self.found.get(what, 0) + found
            self.asked[what] = self.asked.get(what, 0) + len(prompt)
        return answer

    async def round(self, number: int, names: list[str], sizes: dict[str, int]) -> None:
        rng = random.Random(f"{SEED}/{number}")
        told: dict[tuple[str, int], list[int]] = {(name, idx): [] for idx in range(NUM_CONVERSATIONS) for name in names}

        def words(name: str, length: int) -> list[int]:
            return [rng.randrange(sizes[name]) for _ in range(length)]

        for turn in range(NUM_TURNS):
            for key, said in told.items():
                said += words(key[0], QUESTION_TOKENS)
                said += await self.ask(f"turn_{min(turn, 1) + 1}", key[0], said, counts=number >= 0)
        for name in names:
            for _ in range(NUM_CONVERSATIONS):
                await self.ask("never_again", name, words(name, UNIQUE_TOKENS), counts=number >= 0)


async def _run(report: Report, rounds: int) -> None:
    names = [Path(model.source).name for model in demo_models()]
    sizes = {name: read_model_dir(DEMO_MODELS[name]).spec.vocab_size for name in names}
    async with _engine(HOST_BYTES) as with_host, _engine(0) as without:
        benches = {"host": Bench(with_host), "none": Bench(without)}
        for number in range(-1, rounds):
            for bench in list(benches.values())[:: 1 if number % 2 else -1]:  # neither is always first
                await bench.round(number, names, sizes)
        stats = with_host.stats()
    same = sum(mine == theirs for mine, theirs in zip(*(bench.answers for bench in benches.values()), strict=True))
    report.metric("same_answers", same, limit=len(benches["host"].answers), note="with host memory and without")
    notes = {"turn_1": "first turns", "turn_2": "later turns, others having had the pool", "never_again": "unique"}
    for label, bench in benches.items():
        for what, values in bench.ttft_ms.items():
            report.samples(f"ttft_ms.{what}.{label}", values, note=notes[what])
            report.metric(f"found_share.{what}.{label}", bench.found[what] / bench.asked[what], limit=1.0)
    for what in notes:
        ratio = report.metrics[f"ttft_ms.{what}.none.p50"] / report.metrics[f"ttft_ms.{what}.host.p50"]
        report.metric(f"ttft_speedup.{what}", ratio, note="without over with, medians")
    report.metric("pages_stowed", sum(model.prefix_stowed for model in stats.models))
    report.metric("pages_brought_back", sum(model.prefix_brought_back for model in stats.models))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds, after one of warm-up")
    parser.add_argument("--no-write", action="store_true", help="print, keep nothing")
    args = parser.parse_args()
    config = {"rounds": args.rounds, "kv_pool_bytes": POOL_BYTES, "host_pool_bytes": HOST_BYTES}
    report = Report("host_tier", hardware="cpu", config=config, seed=SEED)
    report.summary = "Conversations that take turns in too small a pool, with host memory behind it and without."
    begin_s = time.perf_counter()
    asyncio.run(_run(report, args.rounds))
    print(report.as_markdown())
    print(f"{time.perf_counter() - begin_s:.1f} s")
    if not args.no_write:
        report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
