"""Engine, cluster and NumPy workers together: three families from two pools, tokens of the undivided model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from crosspool.backends.numpy.monolithic import MonolithicModel
from crosspool.core import FinishReason
from tests.support.engine_deployment import (
    Deployment,
    collect,
    load_undivided,
    requests,
    token_ids,
    wanted,
    write_models,
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def undivided(directories: dict[str, Path]) -> dict[str, MonolithicModel]:
    return load_undivided(directories)


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
