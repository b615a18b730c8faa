"""One request over several KV ranks on the NumPy backend: how long it may be, and what its decode steps cost.

    python -m benchmarks.bench_split_kv

one_request_tokens.<model>.<kv>+<w>: prompt and answer of one request that fills the pool of <kv> KV ranks beside <w>
weights ranks; one_request_share: the part of each KV rank's frames that it held at its end, of the rank with least.
split_kv_decode_ms.<model>.<kv>+<w>.<ctx>: time between tokens of one request at that context, over processes. Rounds of
all numbers of ranks alternate. The demo models are small: what is seen is the exchange between KV ranks, not attention.
"""

import argparse
import asyncio
import random
import sys
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

from benchmarks.ranks.engine_drive import engine_of
from benchmarks.report import Report
from crosspool.config import DeploymentConfig
from crosspool.core import SamplingParams
from crosspool.deployment.model_source import DEMO_MODELS
from crosspool.deployment.prepared_model import demo_models
from crosspool.engine.async_engine import AsyncEngine
from crosspool.engine.request import GenerationRequest
from crosspool.models.directory import read_model_dir
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB

SEED = 11
FRAME_BYTES = 64 * KiB
KV_RANKS = (1, 2, 3)
NUM_WEIGHTS = 1
SMALL_POOL_FRAMES = 13  # of each rank, frame 0 included: the pool, not the model, bounds a request
ANSWER_TOKENS = 17
CONTEXTS = (128, 768)
SUMMARY = (
    "How many tokens one request of each demo model may have over one, two and three KV ranks, and what its decode "
    "steps take. All ranks are processes of this machine's cores, so steps over several are slower than on one: what "
    "grows is the request, not its speed."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds, after one of warm-up; 0: no times")
    parser.add_argument("--no-write", action="store_true", help="print, keep nothing")
    args = parser.parse_args()
    config = vars(args) | {"frame_bytes": FRAME_BYTES, "pool_frames": SMALL_POOL_FRAMES}
    report = Report("split_kv", hardware="cpu", config=config, seed=SEED, summary=SUMMARY)
    asyncio.run(_measure(report, args.rounds))
    print(report.as_markdown())
    if not args.no_write:
        report.write()
    return 0


async def _measure(report: Report, rounds: int) -> None:
    names = [Path(model.source).name for model in demo_models()]
    for num_kv in KV_RANKS:
        async with _engine(num_kv, SMALL_POOL_FRAMES * FRAME_BYTES) as engine:
            for name in names:
                await _fill(report, engine, name, num_kv)
    if rounds == 0:
        return
    times: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        engines = {num_kv: await stack.enter_async_context(_engine(num_kv, 16 * MiB)) for num_kv in KV_RANKS}
        for turn in range(rounds + 1):
            for name in names:
                for context in CONTEXTS:
                    for num_kv, engine in engines.items():
                        key = f"split_kv_decode_ms.{name}.{num_kv}+{NUM_WEIGHTS}.{context}"
                        tbt_ms = await _decode_ms(engine, name, context, turn)
                        if turn:
                            times.setdefault(key, []).append(tbt_ms)
    for key in sorted(times):
        report.samples(key, times[key])


def _engine(num_kv: int, kv_pool_bytes: int) -> AbstractAsyncContextManager[AsyncEngine]:
    """The demo models, a process for each rank."""
    pools = PoolsConfig(
        kv_pool_bytes=kv_pool_bytes, frame_bytes=FRAME_BYTES, num_kv_ranks=num_kv, num_weights_ranks=NUM_WEIGHTS
    )
    return engine_of(DeploymentConfig(models=demo_models(), pools=pools))


async def _fill(report: Report, engine: AsyncEngine, name: str, num_kv: int) -> None:
    """Ask for all that the model's context limit lets one request have."""
    info = engine.engine.model(name)
    held = [0.0] * num_kv
    async for _ in engine.generate(_request(name, info.context_limit - ANSWER_TOKENS, f"fill/{num_kv}")):
        shares = [pool.frames_used / pool.frames_budget for pool in engine.stats().pools]
        held = [max(pair) for pair in zip(held, shares, strict=True)]
    where = f"{name}.{num_kv}+{NUM_WEIGHTS}"
    [load] = [load for load in engine.stats().models if load.name == name]
    note = f"split {info.kv_split}, {load.frames_per_page} frames for {load.page_tokens} tokens"
    report.metric(f"one_request_tokens.{where}", info.context_limit, note=note)
    if info.context_limit < read_model_dir(DEMO_MODELS[name]).spec.max_position_embeddings:
        report.metric(f"one_request_share.{where}", min(held), limit=1.0)


async def _decode_ms(engine: AsyncEngine, name: str, context: int, turn: int) -> float:
    """Mean time between tokens of one request whose context is `context` tokens after half of its answer."""
    request = _request(name, context - ANSWER_TOKENS // 2, f"{name}/{context}/{turn}")
    *_, last = [output async for output in engine.generate(request)]
    if last.error is not None:
        raise last.error
    first_s, last_s = last.timings.first_token_s, last.timings.last_token_s
    assert first_s is not None
    assert last_s is not None
    return (last_s - first_s) / (ANSWER_TOKENS - 1) * 1e3


_number = iter(range(1 << 60))


def _request(name: str, num_prompt_tokens: int, seed: str) -> GenerationRequest:
    """A greedy request with a prompt that no other one begins with."""
    rng = random.Random(seed)
    vocab_size = read_model_dir(DEMO_MODELS[name]).spec.vocab_size
    return GenerationRequest(
        request_id=f"r{next(_number)}",
        model=name,
        prompt_token_ids=tuple(rng.randrange(vocab_size) for _ in range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
        seed=0,
    )


if __name__ == "__main__":
    sys.exit(main())
