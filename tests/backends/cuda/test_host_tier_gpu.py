"""Conversations on GPUs whose KV waits in pinned host memory between turns: the tokens of KV that was never away."""

from __future__ import annotations

import asyncio
import random
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
from crosspool.units import KiB  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

PAGE_TOKENS = {"qwen3_moe": 8, "deepseek_v2": 16}
FRAME_BYTES = 8 * KiB
SMALL, AMPLE = 48, 2000
"""Frames of a pool that holds one conversation and a half, and of one that holds all."""

NUM_TALKS, NUM_TURNS, NUM_WORDS, NUM_ANSWERED = 3, 3, 45, 6
"""Conversations of each model, and what is said in each."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        family: write_tiny_model(root / family, family, dtype="bfloat16", tokenizer=False) for family in PAGE_TOKENS
    }


@asynccontextmanager
async def engine_of(directories, num_frames, num_host_frames) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        kv_budget_bytes=num_frames * FRAME_BYTES,
        host_budget_bytes=num_host_frames * FRAME_BYTES,
        frame_bytes=FRAME_BYTES,
    )
    cluster = start_cluster(
        ClusterConfig(
            backend="cuda",
            layout="inprocess",
            hosts=(("kv0", "w0"),),
            num_frames=config.num_frames,
            num_host_frames=config.num_host_frames,
            frame_bytes=FRAME_BYTES,
            max_tokens_per_step=config.max_tokens_per_step,
            num_lanes=config.num_lanes,
            devices=(("kv0", 0), ("w0", 0)),
            spin_us=200_000,
            start_timeout_s=180,
        )
    )
    engine = AsyncEngine(Engine(config, cluster).start())
    try:
        for name, directory in directories.items():
            await engine.add_model(
                served_model(
                    directory,
                    weights_ranks=("w0",),
                    frame_bytes=FRAME_BYTES,
                    kv_dtype="bfloat16",
                    page_tokens=PAGE_TOKENS[name],
                )
            )
        yield engine
    finally:
        await engine.close()


async def turn(engine, model, prompt, number) -> tuple[list[int], int]:
    """The answer, and the prompt's tokens that were found."""
    request = GenerationRequest(
        request_id=f"{model}-{number}",
        model=model,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=NUM_ANSWERED, temperature=0.0, ignore_eos=True),
    )
    outputs = [output async for output in engine.generate(request)]
    assert outputs[-1].error is None, outputs[-1].error
    return [token for output in outputs for token in output.token_ids], outputs[-1].usage.cached_tokens


async def conversations(engine) -> list[tuple[list[int], int]]:
    """Turn by turn, every conversation of both models: the others have had the pool before the next turn of each."""
    rng = random.Random(7)
    told = {(model, number): [] for number in range(NUM_TALKS) for model in PAGE_TOKENS}
    found = []
    for number in range(NUM_TURNS):
        for (model, talk), said in told.items():
            said += [rng.randrange(1, 500) for _ in range(NUM_WORDS)]
            answer, num_found = await turn(engine, model, said, f"{talk}-{number}")
            known = 0 if number == 0 else (len(said) - NUM_WORDS - 1) // PAGE_TOKENS[model] * PAGE_TOKENS[model]
            assert num_found == known, f"{model}, turn {number}: {num_found} tokens found of {known}"
            found.append((answer, num_found))
            said += answer
    return found


def test_kv_that_was_in_host_memory_gives_the_tokens_of_kv_that_was_never_away(directories):
    async def run(num_frames, num_host_frames):
        async with engine_of(directories, num_frames, num_host_frames) as engine:
            return await conversations(engine), engine.stats().models

    expected, _ = asyncio.run(run(AMPLE, 0))
    found, models = asyncio.run(run(SMALL, AMPLE))
    assert found == expected
    assert all(model.prefix_brought_back > 10 for model in models), models
