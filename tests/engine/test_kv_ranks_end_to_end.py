"""Engine, cluster and NumPy workers over several KV ranks: tokens of the undivided model, whichever way KV is split."""

from __future__ import annotations

import asyncio

import pytest

from crosspool.core import SamplingParams
from crosspool.engine.request import GenerationRequest
from tests.support.engine_deployment import (
    FRAME_BYTES,
    Deployment,
    collect,
    requests,
    token_ids,
    wanted,
)

TWO, THREE = ("kv0", "kv1"), ("kv0", "kv1", "kv2")


@pytest.mark.parametrize(
    ("layout", "split", "ranks"),
    [
        ("inprocess", "auto", TWO),
        ("inprocess", "tokens", THREE),
        ("inprocess", "one", THREE),
        ("processes", "auto", TWO),
        ("processes", "tokens", TWO),
        ("processes", "one", TWO),
    ],
)
async def test_three_families_generate_the_undivided_models_tokens(directories, undivided, layout, split, ranks):
    async with Deployment(directories, layout, kv_split=split, kv_ranks=ranks) as deployment:
        splits = [model.kv_split for model in deployment.models]
        assert splits == (["heads", "tokens", "tokens"] if split == "auto" else [split] * 3)
        todo = requests(12, 16)
        results = await asyncio.gather(*(collect(deployment.engine, request) for request in todo))
        for request, outputs in zip(todo, results, strict=True):
            assert token_ids(outputs) == wanted(undivided[request.model], request)
        await deployment.until_free()


@pytest.mark.parametrize("split", ["auto", "one"])
async def test_streams_survive_the_death_of_either_kv_rank_with_the_very_same_tokens(directories, undivided, split):
    async with Deployment(directories, "processes", kv_split=split, kv_ranks=TWO) as deployment:
        todo = requests(6, 60)
        tasks = [asyncio.create_task(collect(deployment.engine, request)) for request in todo]
        for count, rank in enumerate(("kv1", "kv0"), 1):
            steps = deployment.engine.stats().num_steps
            while deployment.engine.stats().num_steps < steps + 15:
                await asyncio.sleep(0.005)
            deployment.kill(rank)
            while deployment.engine.stats().num_ranks_lost < count:
                await asyncio.sleep(0.005)
        for request, outputs in zip(todo, await asyncio.gather(*tasks), strict=True):
            assert outputs[-1].error is None, outputs[-1].error
            assert token_ids(outputs) == wanted(undivided[request.model], request)
        assert sum(model.num_preempted for model in deployment.engine.stats().models) >= 1
        await deployment.until_free()


@pytest.mark.parametrize(("split", "ranks"), [("auto", TWO), ("tokens", THREE)])
async def test_a_prompt_asked_again_is_not_run_again_and_gets_the_same_answer(directories, undivided, split, ranks):
    async with Deployment(directories, "inprocess", kv_split=split, kv_ranks=ranks) as deployment:
        for family in directories:
            shared = tuple(7 * position % 500 + 1 for position in range(70))
            for number, prompt in enumerate((shared, shared, (*shared[:50], 9, 9), (*shared, 5))):
                request = GenerationRequest(
                    request_id=f"{family}{number}",
                    model=family,
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
                )
                outputs = await collect(deployment.engine, request)
                assert token_ids(outputs) == wanted(undivided[family], request)
                assert outputs[-1].usage.cached_tokens == (0, 64, 48, 64)[number]
        await deployment.until_free()


@pytest.mark.parametrize(("family", "num_tokens"), [("deepseek_v2", 640), ("qwen3_moe", 320)])
async def test_one_request_takes_all_pages_of_both_ranks(directories, undivided, family, num_tokens):
    """20 pages of 16 tokens fit each rank; under `heads` (qwen3_moe) each of them takes both."""
    async with Deployment(directories, "processes", kv_ranks=TWO, kv_budget_bytes=21 * FRAME_BYTES) as deployment:
        assert deployment.engine.model(family).context_limit == num_tokens
        request = GenerationRequest(
            request_id="long",
            model=family,
            prompt_token_ids=tuple(3 * position % 500 + 1 for position in range(num_tokens - 12)),
            sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        )
        most = [0, 0]
        outputs = []
        async for output in deployment.engine.generate(request):
            outputs.append(output)
            held = [pool.frames_used for pool in deployment.engine.stats().pools]
            most = [max(pair) for pair in zip(most, held, strict=True)]
        assert min(most) >= 0.95 * 20
        assert token_ids(outputs) == wanted(undivided[family], request)
        await deployment.until_free()
