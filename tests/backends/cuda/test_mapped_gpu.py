"""Models on one GPU on frames that are mapped for each of them: the tokens of an arena, and decode never waits."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

torch = pytest.importorskip("torch")

from crosspool.cluster.config import ClusterConfig  # noqa: E402
from crosspool.cluster.start import start_cluster  # noqa: E402
from crosspool.core import SamplingParams  # noqa: E402
from crosspool.engine.async_engine import AsyncEngine  # noqa: E402
from crosspool.engine.config import EngineConfig  # noqa: E402
from crosspool.engine.engine import Engine  # noqa: E402
from crosspool.engine.request import GenerationRequest  # noqa: E402
from crosspool.engine.serve_directory import served_model  # noqa: E402
from crosspool.units import MiB  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

FAMILIES = {"P": "deepseek_v2", "Q": "qwen3_moe", "R": "glm4_moe_lite"}
PAGE_TOKENS = {"P": 16, "Q": 8, "R": 32}
ROUND = itertools.count()
SHORT, AMPLE = 24, 400
"""Frames of a pool that a wave of requests fills, and of one that it does not."""


@pytest.fixture(scope="module", autouse=True)
def _short_turns_of_the_interpreter():
    """The ranks' thread looks at its words without a pause; by default it gives the others a turn every 5 ms only."""
    kept = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(kept)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny_model(root / name, family, dtype="bfloat16", tokenizer=False)
        for name, family in FAMILIES.items()
    }


def model_of(directories, name):
    return served_model(
        directories[name],
        weights_ranks=("w0",),
        frame_bytes=2 * MiB,
        kv_dtype="bfloat16",
        page_tokens=PAGE_TOKENS[name],
    )


@asynccontextmanager
async def engine_of(directories, backing, num_frames) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(kv_budget_bytes=(num_frames + 1) * 2 * MiB, frame_bytes=2 * MiB, kv_backing=backing)
    cluster = start_cluster(
        ClusterConfig(
            backend="cuda",
            layout="inprocess",
            hosts=(("kv0", "w0"),),
            num_frames=config.num_frames,
            frame_bytes=2 * MiB,
            kv_backing=backing,
            max_tokens_per_step=config.max_tokens_per_step,
            num_lanes=config.num_lanes,
            devices=(("kv0", 0), ("w0", 0)),
            spin_us=200_000,
            start_timeout_s=180,
        )
    )
    engine, begin_s = AsyncEngine(Engine(config, cluster).start()), time.monotonic()
    try:
        for name in directories:
            await engine.add_model(model_of(directories, name))
            print(f"{backing}: {name} is ready after {time.monotonic() - begin_s:.1f} s", flush=True)
        yield engine
        stats = engine.stats()
        print(f"{backing}: {stats.num_steps} steps after {time.monotonic() - begin_s:.1f} s", flush=True)
        assert stats.num_replays == 0, f"{stats.num_replays} steps waited past their deadline and were run again"
    finally:
        await engine.close()


async def answer(engine, model, number, max_tokens=12):
    request = GenerationRequest(
        request_id=f"{model}-{number}-{next(ROUND)}",
        model=model,
        prompt_token_ids=tuple((7 * number + position) % 300 + 5 for position in range(20 + 13 * number)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        seed=1,
    )
    outputs = [output async for output in engine.generate(request)]
    assert outputs[-1].error is None, outputs[-1]
    return [token for output in outputs for token in output.token_ids]


async def one_by_one(engine):
    """Alone in their steps, so that tokens do not depend on who else was there."""
    begin_s = time.monotonic()
    found = [await answer(engine, model, number) for model in "PQRQP" for number in range(3)]
    print(f"  one by one: {len(found)} requests in {time.monotonic() - begin_s:.1f} s", flush=True)
    return found


async def waves(engine):
    for wave in ("PQR", "Q", "PQ"):
        begin_s = time.monotonic()
        await asyncio.gather(*(answer(engine, model, number) for model in wave for number in range(5)))
        print(f"  wave {wave}: {time.monotonic() - begin_s:.1f} s", flush=True)


def test_frames_that_move_from_model_to_model_give_the_tokens_of_an_arena(directories):
    async def run(backing):
        async with engine_of(directories, backing, SHORT) as engine:
            found = [await one_by_one(engine)]
            await waves(engine)
            return [*found, await one_by_one(engine)], engine.stats().backings

    expected, _ = asyncio.run(run("arena"))
    found, backings = asyncio.run(run("vmm"))
    assert found == expected
    counts = backings["kv0"]
    print(counts)
    assert counts.maps > 30
    assert counts.unmaps > 30
    assert counts.failures == 0


def test_while_frames_are_free_no_decode_step_waits_and_a_model_that_is_removed_can_come_back(directories):
    async def run():
        async with engine_of(directories, "vmm", AMPLE) as engine:
            await waves(engine)
            counts, found = engine.stats().backings["kv0"], [await answer(engine, "Q", 3)]
            for _ in range(2):
                await engine.remove_model("Q")
                await engine.add_model(model_of(directories, "Q"))
                found.append(await answer(engine, "Q", 3))
            return counts, found

    counts, (first, *others) = asyncio.run(run())
    print(counts)
    assert (counts.decode_waits, counts.full_waits) == (0, 0), counts
    assert others == [first, first]
