"""What the prefix cache saves on the demo models, and what it costs for each page.

    python -m benchmarks.bench_prefix_cache

ttft_ms: time to first token of a prompt of 960 tokens, at the engine, that was never asked (cold), was asked just
before (warm), and with caching switched off. conversation_s: four turns of one conversation, each prompt being all
before it. The costs are those of the engine's thread alone, without any worker; a hit has to cost less than running its
tokens.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from benchmarks.ranks.engine_drive import engine_of, greedy_outputs
from benchmarks.report import Report
from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig
from crosspool.core import Request, SamplingParams
from crosspool.deployment.model_source import DEMO_MODELS
from crosspool.deployment.prepared_model import demo_models
from crosspool.engine.admission import PageBudget
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.output import RequestOutput
from crosspool.engine.prefix_pages import PrefixPages
from crosspool.engine.sequence import Sequence as EngineSequence
from crosspool.engine.serve_directory import served_model
from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.block_table import BlockTable
from crosspool.kv_pool.pool import KVPool
from crosspool.models.directory import read_model_dir
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB

SEED = 5
FRAME_BYTES = 64 * KiB
POOL_BYTES = 24 * MiB
"""So little that the warm-up writes into all of it: memory is slow the first time, and evictions come with the rest."""

NUM_WARM_UPS = 3
PROMPT_TOKENS = 960
NUM_TURNS, QUESTION_TOKENS, ANSWER_TOKENS = 4, 200, 16
PAGE_TOKENS = 256
INDEX_PAGES = (1_000, 100_000, 1_000_000)
CHAIN_PAGES = 500
SUMMARY = (
    "Prompts of 960 tokens of the demo models at the engine: never asked (`cold`), asked just before (`warm`), and "
    "with caching off; conversations of four turns with and without it (`on`, `off`). Costs of a page are those of the "
    "engine's thread alone. Pools and workers share this machine's cores."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds, after some of warm-up")
    parser.add_argument("--no-write", action="store_true", help="print, keep nothing")
    args = parser.parse_args()
    report = Report(
        "prefix_cache", hardware="cpu", config=vars(args) | {"frame_bytes": FRAME_BYTES}, seed=SEED, summary=SUMMARY
    )
    asyncio.run(_served(report, args.rounds))
    _page_costs(report, args.rounds)
    print(report.as_markdown())
    if not args.no_write:
        report.write()
    return 0


def _engine(*, caches: bool) -> AbstractAsyncContextManager[AsyncEngine]:
    """The demo models on two processes, in frames that suit their size."""
    return engine_of(
        DeploymentConfig(
            models=tuple(ModelConfig(source=model.source, page_tokens=64) for model in demo_models()),
            pools=PoolsConfig(kv_pool_bytes=POOL_BYTES, frame_bytes=FRAME_BYTES),
            scheduling=SchedulingConfig(enable_prefix_caching=caches),
        )
    )


async def _served(report: Report, rounds: int) -> None:
    names = [Path(model.source).name for model in demo_models()]
    times: dict[str, list[float]] = {}
    async with _engine(caches=True) as on, _engine(caches=False) as off:
        for turn in range(-NUM_WARM_UPS, rounds):
            for name in names:
                rng = random.Random(f"{name}/{turn}")
                prompt = _words(rng, name, PROMPT_TOKENS)
                own = [("cold", on), ("warm", on)]
                for key, engine in (
                    [*own, ("off", off)] if turn % 2 else [("off", off), *own]
                ):  # neither is always first
                    spent = await _ttft_ms(engine, name, prompt)
                    if turn >= 0:
                        times.setdefault(f"ttft_ms.{name}.{key}", []).append(spent)
                for key, engine in (("on", on), ("off", off)) if turn % 2 else (("off", off), ("on", on)):
                    spent = await _conversation_s(engine, name, random.Random(f"{name}/{turn}/c"))
                    if turn >= 0:
                        times.setdefault(f"conversation_s.{name}.{key}", []).append(spent)
        stats = on.stats()
    for key in sorted(times):
        report.samples(key, times[key])
    for name in names:
        ttft = {key: report.metrics[f"ttft_ms.{name}.{key}.p50"] for key in ("cold", "warm", "off")}
        whole = {key: report.metrics[f"conversation_s.{name}.{key}.p50"] for key in ("on", "off")}
        report.metric(
            f"ttft_speedup.{name}", ttft["cold"] / ttft["warm"], limit=PROMPT_TOKENS / 64, note="pages run: 1"
        )
        report.metric(f"ttft_overhead_percent.{name}", 100 * (ttft["cold"] / ttft["off"] - 1), note="nothing is found")
        report.metric(f"conversation_speedup.{name}", whole["off"] / whole["on"])
    hits = sum(model.prefix_hits for model in stats.models) / sum(model.prefix_queries for model in stats.models)
    report.metric("hit_rate", hits, note="tokens found / tokens of prompts, over the whole run")


def _words(rng: random.Random, name: str, count: int) -> tuple[int, ...]:
    vocab_size = read_model_dir(DEMO_MODELS[name]).spec.vocab_size
    return tuple(rng.randrange(vocab_size) for _ in range(count))


_number = iter(range(1 << 60))


async def _ask(engine: AsyncEngine, name: str, prompt: Sequence[int], max_tokens: int) -> list[RequestOutput]:
    return await greedy_outputs(engine, name, prompt, max_tokens, f"r{next(_number)}")


async def _ttft_ms(engine: AsyncEngine, name: str, prompt: Sequence[int]) -> float:
    ttft_s = (await _ask(engine, name, prompt, 1))[-1].timings.ttft_s
    assert ttft_s is not None
    return ttft_s * 1e3


async def _conversation_s(engine: AsyncEngine, name: str, rng: random.Random) -> float:
    start = time.perf_counter()
    said: list[int] = []
    for _ in range(NUM_TURNS):
        said += _words(rng, name, QUESTION_TOKENS)
        for output in await _ask(engine, name, said, ANSWER_TOKENS):
            said += output.token_ids
    return time.perf_counter() - start


def _page_costs(report: Report, rounds: int) -> None:
    """The engine's own cost for a page: its key, finding it, letting it be known and leaving it, evicting it."""
    model = served_model(
        DEMO_MODELS["austen"],
        weights_ranks=("w0",),
        frame_bytes=MiB,
        page_tokens=PAGE_TOKENS,
        kv_dtype="float32",
        name="austen",
    )
    for num_pages in INDEX_PAGES:
        times: dict[str, list[float]] = {}
        rank = _Rank(model, num_pages + 2 * CHAIN_PAGES)
        rank.fill(num_pages)
        for turn in range(rounds + 1):
            for what, seconds in rank.round(turn).items():
                if turn:
                    times.setdefault(what, []).append(seconds / CHAIN_PAGES * 1e6)
        for what, values in times.items():
            report.samples(f"{what}_us_per_page.{num_pages}", values)


class _Rank:
    """One KV rank's pages, of one model, without an engine around them."""

    def __init__(self, model: ServedModel, num_pages: int) -> None:
        self.model = model
        self.pool = KVPool(num_pages * model.frames_per_page + 1)
        self.budget = PageBudget(self.pool.budget)
        self.prefix = PrefixPages(self.pool, self.budget, {model.name: model})
        self.pool.add_model(model.name, model.frames_per_page)
        self.prefix.add_model(model.name)

    def fill(self, num_pages: int) -> None:
        """Reusable pages of others, more than a CPU's caches hold."""
        for number, page in enumerate(self.pool.allocate(self.model.name, num_pages) or ()):
            self.prefix.cache.insert(self.model.name, number.to_bytes(32, "little"), page, None)

    def round(self, turn: int) -> dict[str, float]:
        """Seconds for CHAIN_PAGES pages of each kind of work."""
        name, prompt = self.model.name, [turn * 1000 + place % 1000 for place in range(CHAIN_PAGES * PAGE_TOKENS)]
        first, second = self._sequence(1, prompt), self._sequence(2, [*prompt, 1])
        first.table.extend(self.pool.allocate(name, CHAIN_PAGES) or ())
        chain = self.prefix._prefix(first).chain
        spent = {"hash": _timed(lambda: chain.reach(CHAIN_PAGES, first.token_ids))}
        first.num_cached_tokens = len(prompt)
        spent["insert"] = _timed(lambda: self.prefix.note_filled(first))
        self.prefix.find(second)  # its keys are made once
        spent["lookup"] = _timed(lambda: self.prefix.find(second))
        assert len(self.prefix.find(second)) == CHAIN_PAGES
        pages = first.table.clear()
        spent["leave"] = _timed(lambda: self.prefix.leave(first, pages))
        wanted = self.pool.num_free + CHAIN_PAGES * self.model.frames_per_page
        spent["evict"] = _timed(lambda: self.prefix.make_room(name, wanted))
        return spent

    def _sequence(self, number: int, prompt: list[int]) -> EngineSequence:
        request = Request(
            request_id=str(number),
            model=self.model.name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1),
        )
        return EngineSequence(sequence_id=number, request=request, table=BlockTable(PAGE_TOKENS))


def _timed(work: Callable[[], object]) -> float:
    """Seconds of this thread's own time: a page costs microseconds, and others may want the core."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


if __name__ == "__main__":
    sys.exit(main())
