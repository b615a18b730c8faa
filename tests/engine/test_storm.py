"""Load, disconnects, killed and frozen workers on the real stack: nothing accepted is lost, all is given back."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import psutil
import pytest

from crosspool.core import FinishReason, SamplingParams
from crosspool.engine.request import GenerationRequest
from crosspool.errors import QueueFullError
from tests.support.engine_deployment import (
    FAMILIES,
    Deployment,
    collect,
    load_undivided,
    token_ids,
)

NUM_ROUNDS = int(os.environ.get("CROSSPOOL_STORM_ROUNDS", "4"))


def a_request(rng: random.Random, index: int, max_tokens: int = 40) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"storm-{index}",
        model=rng.choice(FAMILIES),
        prompt_token_ids=tuple(rng.randrange(1, 500) for _ in range(rng.randint(1, 120))),
        sampling=SamplingParams(
            max_tokens=rng.randint(1, max_tokens),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 5]),
            presence_penalty=rng.choice([0.0, 0.5]),
            ignore_eos=True,
        ),
        seed=rng.randrange(1000),
    )


def wanted_of(undivided, request: GenerationRequest) -> list[int]:
    """The request's tokens from its model undivided, by its own seed."""
    sampling = SamplingParams(
        max_tokens=request.sampling.max_tokens,
        temperature=request.sampling.temperature,
        top_k=request.sampling.top_k,
        presence_penalty=request.sampling.presence_penalty,
        seed=request.seed,
    )
    return undivided[request.model].generate(request.prompt_token_ids, sampling)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["inprocess", "processes"])
@pytest.mark.parametrize("lanes", [{}, {"num_decode_lanes": 3, "decode_steps": 8}], ids=["steps", "runs"])
async def test_two_hundred_requests_at_once_with_disconnects(directories, layout, lanes):
    rng = random.Random(3)
    undivided = load_undivided(directories)
    async with Deployment(directories, layout, max_queue=50, max_num_seqs=8, **lanes) as deployment:
        refused = left = 0
        running: list[tuple[GenerationRequest, asyncio.Task]] = []

        async def leave_early(request: GenerationRequest, after: int) -> None:
            async with deployment.engine.generate(request) as stream:
                async for _ in stream:
                    after -= 1
                    if after <= 0:
                        return

        for index in range(200):
            request = a_request(rng, index)
            try:
                if rng.random() < 0.25:
                    left += 1
                    await asyncio.wait_for(leave_early(request, rng.randint(0, 5)), timeout=rng.uniform(0.01, 0.3))
                else:
                    task = asyncio.create_task(collect(deployment.engine, request))
                    await asyncio.sleep(0)
                    if task.done():
                        task.result()
                    running.append((request, task))
            except QueueFullError:
                refused += 1
            except TimeoutError:
                pass
        for request, task in running:
            outputs = await task
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert token_ids(outputs) == wanted_of(undivided, request)
        await deployment.until_free()
        assert left > 20
        assert len(running) > 100
        assert len(asyncio.all_tasks()) == 1
        assert not deployment.engine.engine._callers


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_killed_and_frozen_workers_under_load_lose_nothing(directories):
    rng = random.Random(7)
    undivided = load_undivided(directories)
    async with Deployment(directories, "processes", max_num_seqs=8) as deployment:
        for round_index in range(NUM_ROUNDS):
            batch = [a_request(rng, 1000 * round_index + index) for index in range(12)]
            tasks = [asyncio.create_task(collect(deployment.engine, request)) for request in batch]
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            rank = ("w0", "kv0", "w1")[round_index % 3]
            deployment.kill(rank, rng.choice([signal.SIGKILL, signal.SIGSTOP]))
            for request, task in zip(batch, tasks, strict=True):
                outputs = await task
                assert outputs[-1].error is None, outputs[-1].error
                assert token_ids(outputs) == wanted_of(undivided, request)
            await deployment.until_free()
            while deployment.engine.stats().ranks_down:
                await asyncio.sleep(0.02)
    assert not psutil.Process().children(recursive=True)
