"""Engine, cluster and NumPy workers together: three families from two pools, tokens of the undivided model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from crosspool.core import FinishReason, SamplingParams
from crosspool.engine.request import GenerationRequest
from tests.support.engine_deployment import (
    Deployment,
    collect,
    requests,
    token_ids,
    wanted,
)


@pytest.mark.parametrize("layout", ["inprocess", "processes"])
@pytest.mark.parametrize("admission", ["reserve", "forecast"])
async def test_three_families_generate_the_undivided_models_tokens(directories, undivided, layout, admission):
    async with Deployment(directories, layout, admission=admission) as deployment:
        todo = requests(12, 16)
        results = await asyncio.gather(*(collect(deployment.engine, request) for request in todo))
        for request, outputs in zip(todo, results, strict=True):
            assert token_ids(outputs) == wanted(undivided[request.model], request)
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            model = next(model for model in deployment.models if model.name == request.model)
            text = "".join(output.text for output in outputs)
            assert text == model.tokenizer.decode(token_ids(outputs))
        await deployment.until_free()


async def test_streams_survive_killed_workers_with_the_very_same_tokens(directories, undivided):
    async with Deployment(directories, "processes") as deployment:
        todo = requests(6, 60)
        tasks = [asyncio.create_task(collect(deployment.engine, request)) for request in todo]
        for rank in ("w1", "kv0"):
            steps = deployment.engine.stats().num_steps
            while deployment.engine.stats().num_steps < steps + 15:
                await asyncio.sleep(0.005)
            deployment.kill(rank)
            while deployment.engine.stats().num_ranks_lost == 0:
                await asyncio.sleep(0.005)
        for request, outputs in zip(todo, await asyncio.gather(*tasks), strict=True):
            assert outputs[-1].error is None, outputs[-1].error
            assert token_ids(outputs) == wanted(undivided[request.model], request)
        assert deployment.engine.stats().num_ranks_lost == 2
        await deployment.until_free()


async def test_with_no_recovery_time_a_lost_worker_is_a_clear_error_and_the_next_request_is_served(
    directories, undivided
):
    async with Deployment(directories, "processes", recovery_timeout_s=0.0) as deployment:
        [first, *_] = requests(1, 400)
        stream = deployment.engine.generate(first)
        await anext(stream)
        deployment.kill("kv0")
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "kv0" in str(outputs[-1].error)
        while deployment.engine.stats().ranks_down:
            await asyncio.sleep(0.02)
        [_, second] = requests(2, 8)
        assert token_ids(await collect(deployment.engine, second)) == wanted(undivided[second.model], second)


async def test_a_model_is_removed_and_added_again_while_others_serve(directories, undivided):
    async with Deployment(directories, "processes") as deployment:
        [keep, again, *_] = requests(2, 60)
        running = asyncio.create_task(collect(deployment.engine, keep))
        await deployment.engine.remove_model(again.model)
        model = next(model for model in deployment.models if model.name == again.model)
        await deployment.engine.add_model(model)
        assert token_ids(await collect(deployment.engine, again)) == wanted(undivided[again.model], again)
        assert token_ids(await running) == wanted(undivided[keep.model], keep)


async def test_a39_a_seed_gives_the_same_tokens_alone_and_in_any_company(directories):
    async with Deployment(directories, "inprocess") as deployment:
        sampling = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
        seeded = GenerationRequest(
            request_id="seeded",
            model="qwen3_moe",
            prompt_token_ids=(5, 6, 7, 8),
            sampling=sampling,
            seed=1234,
        )
        alone = token_ids(await collect(deployment.engine, seeded))
        for other_seed in (None, 99):
            others = [
                replace(seeded, request_id=f"other-{other_seed}-{index}", seed=other_seed, prompt_token_ids=(9, index))
                for index in range(3)
            ]
            found = await asyncio.gather(*(collect(deployment.engine, request) for request in [seeded, *others]))
            assert token_ids(found[0]) == alone

        async def three(request_id: str) -> list[list[int]]:
            outputs = await collect(deployment.engine, replace(seeded, request_id=request_id, n=3))
            return [token_ids([output for output in outputs if output.index == index]) for index in range(3)]

        first = await three("a")
        assert first[0] == alone
        assert await three("b") == first
        assert len({tuple(tokens) for tokens in first}) == 3
        unseeded = [
            token_ids(await collect(deployment.engine, replace(seeded, request_id=f"free-{index}", seed=None)))
            for index in range(2)
        ]
        assert unseeded[0] != unseeded[1]


async def test_a11_every_end_token_stops_and_none_is_in_the_text(directories):
    async with Deployment(directories, "inprocess") as deployment:
        model = deployment.models[0]
        assert model.spec.eos_token_ids
        for eos in model.spec.eos_token_ids:
            request = GenerationRequest(
                request_id=f"eos-{eos}",
                model=model.name,
                prompt_token_ids=(5, 6, 7),
                sampling=SamplingParams(max_tokens=20, min_tokens=5, temperature=0.0, logit_bias=((eos, 100.0),)),
                skip_special_tokens=False,
            )
            outputs = await collect(deployment.engine, request)
            assert outputs[-1].finish_reason is FinishReason.STOP
            assert outputs[-1].stop_reason == eos
            ids = token_ids(outputs)
            assert ids[-1] == eos
            assert len(ids) >= 5
            assert "".join(output.text for output in outputs) == model.tokenizer.decode(
                ids[:-1], skip_special_tokens=False
            )


async def test_a10_odd_fields_are_refused_and_running_answers_are_unchanged(directories, undivided):
    async with Deployment(directories, "inprocess") as deployment:
        [first, second] = requests(2, 40)
        running = [asyncio.create_task(collect(deployment.engine, request)) for request in (first, second)]
        await asyncio.sleep(0.05)
        vocab_size = deployment.models[0].spec.vocab_size
        bad = replace(first, request_id="bad")
        for request in (
            replace(bad, sampling=replace(first.sampling, logit_bias=((99999999, -3.0),))),
            replace(bad, sampling=replace(first.sampling, stop_token_ids=(vocab_size,))),
            replace(bad, prompt_token_ids=(1, vocab_size)),
            replace(bad, prompt_token_ids=(-1,)),
        ):
            with pytest.raises(ValueError, match=r"token id -?\d+"):
                deployment.engine.generate(request)
        wide = replace(first, request_id="wide", sampling=replace(first.sampling, top_k=8589934592, temperature=1e-30))
        await collect(deployment.engine, wide)
        for request, task in zip((first, second), running, strict=True):
            assert token_ids(await task) == wanted(undivided[request.model], request)
