"""The prefix cache on real workers: a hit never changes an answer, for any attention, under pressure, after losses."""

from __future__ import annotations

import asyncio
import random

import pytest

from crosspool.core import SamplingParams
from crosspool.engine.output import RequestOutput
from crosspool.engine.request import GenerationRequest
from crosspool.models.directory import read_model_dir
from tests.support.engine_deployment import (
    FRAME_BYTES,
    WEIGHTS_RANKS,
    Deployment,
    collect,
    token_ids,
)
from tests.support.monolithic import MonolithicModel
from tests.support.tiny_models import write_tiny_model

ATTENTIONS = ("qwen3_moe", "deepseek_v2", "glm4_moe_lite", "gpt_oss", "olmoe")
"""GQA, MLA with and without a compressed query, sinks and windows, a norm over all heads."""


def a_request(model: str, prompt: list[int], max_tokens: int = 12, **changes) -> GenerationRequest:
    a_request.count = getattr(a_request, "count", 0) + 1
    return GenerationRequest(
        request_id=f"prefix-{a_request.count}",
        model=model,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, num_logprobs=2),
        **changes,
    )


def alone(model: MonolithicModel, request: GenerationRequest) -> list[int]:
    sampling = SamplingParams(max_tokens=request.sampling.max_tokens, temperature=0.0, ignore_eos=True)
    return model.generate(request.prompt_token_ids, sampling)


def cached(outputs: list[RequestOutput]) -> int:
    return outputs[-1].usage.cached_tokens


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [entry.logprob for output in outputs for entry in output.logprobs or ()]


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 500) for _ in range(count)]


async def test_a13_pages_that_went_to_another_model_are_not_found_and_the_answer_is_the_same(directories, undivided):
    rng = random.Random(13)
    question, more = words(rng, 300), words(rng, 20)
    async with Deployment(directories, "inprocess", kv_budget_bytes=63 * FRAME_BYTES) as deployment:
        engine = deployment.engine
        first = await collect(engine, a_request("qwen3_moe", question))
        again = await collect(engine, a_request("qwen3_moe", question))
        assert (cached(first), cached(again)) == (0, 288)
        for _ in range(2):  # every page of the pool has been the other model's before it is asked again
            await collect(engine, a_request("deepseek_v2", words(rng, 980), 4))
            back = await collect(engine, a_request("qwen3_moe", question))
            assert cached(back) == 0
            longer = await collect(engine, a_request("qwen3_moe", [*question, *more]))
            assert cached(longer) == 288
            assert token_ids(back) == token_ids(first) == alone(undivided["qwen3_moe"], a_request("", question))
            assert token_ids(longer) == alone(undivided["qwen3_moe"], a_request("", [*question, *more]))
        await deployment.until_free()


async def test_a13_a_model_that_was_removed_and_came_back_finds_nothing(directories, undivided):
    question = words(random.Random(14), 100)
    async with Deployment(directories, "inprocess") as deployment:
        engine = deployment.engine
        first = await collect(engine, a_request("glm4_moe_lite", question))
        model = next(model for model in deployment.models if model.name == "glm4_moe_lite")
        await engine.remove_model(model.name)
        await collect(engine, a_request("qwen3_moe", words(random.Random(15), 200)))
        await engine.add_model(model)
        again = await collect(engine, a_request("glm4_moe_lite", question))
        assert cached(again) == 0
        assert token_ids(again) == token_ids(first)


@pytest.mark.parametrize("seed", range(3))
async def test_random_conversations_of_three_models_in_too_small_a_pool_give_the_tokens_of_none_cached(
    directories, undivided, seed
):
    rng = random.Random(seed)
    told: dict[str, list[list[int]]] = {name: [[]] for name in undivided}
    hits = 0
    async with Deployment(
        directories,
        "inprocess",
        kv_budget_bytes=28 * FRAME_BYTES,
        admission=rng.choice(["reserve", "forecast"]),
        max_num_batched_tokens=rng.choice([16, 48]),
        num_prefill_lanes=rng.choice([1, 2]),
    ) as deployment:
        for _ in range(8):
            requests = []
            for _ in range(rng.randint(2, 6)):
                name = rng.choice(sorted(told))
                earlier = rng.choice(told[name])
                prompt = [*earlier[: rng.randint(0, len(earlier))], *words(rng, rng.randint(1, 30))][-180:]
                requests.append(a_request(name, prompt, rng.randint(1, 24), n=rng.choice([1, 1, 2])))
            results = await asyncio.gather(*(collect(deployment.engine, request) for request in requests))
            for request, outputs in zip(requests, results, strict=True):
                wanted = alone(undivided[request.model], request)
                for index in range(request.n):
                    assert token_ids([output for output in outputs if output.index == index]) == wanted
                told[request.model].append([*request.prompt_token_ids, *wanted])
                hits += cached(outputs)
        assert hits > 100
        assert sum(model.prefix_evictions for model in deployment.engine.stats().models) > 10
        await deployment.until_free()


@pytest.mark.parametrize("family", ATTENTIONS)
async def test_a30_a_warm_answer_has_the_tokens_and_logprobs_of_a_cold_one(tmp_path, family):
    """Prompts reach beyond every window; the second turn goes on behind pages that the first answer filled."""
    rng = random.Random(30)
    directory = write_tiny_model(tmp_path / family, family)
    whole = MonolithicModel.load(read_model_dir(directory), len(WEIGHTS_RANKS))
    async with Deployment({family: directory}, "inprocess") as deployment:
        engine = deployment.engine
        for length in (200, 333):
            turn = words(rng, length)
            cold = await collect(engine, a_request(family, turn, 24))
            warm = await collect(engine, a_request(family, turn, 24))
            assert (cached(cold), cached(warm)) == (0, (length - 1) // 16 * 16)
            assert token_ids(warm) == token_ids(cold) == alone(whole, a_request("", turn, 24))
            assert logprobs(warm) == pytest.approx(logprobs(cold), abs=1e-4)
            turn = [*turn, *token_ids(cold), *words(rng, 9)]
            second = await collect(engine, a_request(family, turn, 24))
            other = await collect(engine, a_request(family, turn, 24, cache_salt="nobody's"))
            assert cached(second) == (length + 24 - 1) // 16 * 16
            assert cached(other) == 0
            assert token_ids(second) == token_ids(other) == alone(whole, a_request("", turn, 24))
            assert logprobs(second) == pytest.approx(logprobs(other), abs=1e-4)


@pytest.mark.parametrize("chunk", [128, 512])
async def test_a46_an_mla_prompt_behind_a_thousand_cached_tokens(tmp_path, chunk):
    rng = random.Random(46)
    directory = write_tiny_model(tmp_path / "mla", "deepseek_v2")
    prompt = words(rng, 1500)
    async with Deployment(
        {"mla": directory}, "inprocess", kv_budget_bytes=600 * FRAME_BYTES, max_num_batched_tokens=chunk
    ) as deployment:
        await collect(deployment.engine, a_request("mla", prompt[:1001], 1))
        warm = await collect(deployment.engine, a_request("mla", prompt, 32))
        cold = await collect(deployment.engine, a_request("mla", prompt, 32, cache_salt="cold"))
    assert (cached(warm), cached(cold)) == (992, 0)
    assert token_ids(warm) == token_ids(cold)
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=1e-4)


async def test_a_salt_keeps_what_one_asks_from_others(directories):
    prompt = words(random.Random(1), 80)
    async with Deployment(directories, "inprocess") as deployment:
        for salt in (None, "mine", "yours"):
            for expected in (0, 64):
                outputs = await collect(deployment.engine, a_request("qwen3_moe", prompt, 4, cache_salt=salt))
                assert cached(outputs) == expected


async def test_requests_that_share_pages_survive_killed_workers_with_the_very_same_tokens(directories, undivided):
    rng = random.Random(2)
    prompts = {name: words(rng, 120) for name in undivided}
    async with Deployment(directories, "processes") as deployment:
        engine = deployment.engine
        for name, prompt in prompts.items():
            await collect(engine, a_request(name, prompt, 4))
        todo = [a_request(name, [*prompts[name], *words(rng, 5)], 50, n=2) for name in prompts]
        for rank in ("w1", "kv0"):
            tasks = [asyncio.create_task(collect(engine, request)) for request in todo]
            steps = engine.stats().num_steps
            while engine.stats().num_steps < steps + 15:
                await asyncio.sleep(0.005)
            deployment.kill(rank)
            for request, outputs in zip(todo, await asyncio.gather(*tasks), strict=True):
                assert outputs[-1].error is None, outputs[-1].error
                assert cached(outputs) == 112
                for index in range(2):
                    own = [output for output in outputs if output.index == index]
                    assert token_ids(own) == alone(undivided[request.model], request)
            todo = [a_request(request.model, list(request.prompt_token_ids), 50, n=2) for request in todo]
            await deployment.until_free()
        assert engine.stats().num_ranks_lost == 2
