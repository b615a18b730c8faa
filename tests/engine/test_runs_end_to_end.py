"""Runs on real NumPy workers in processes: tokens of the undivided model, also when ranks are killed under them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from crosspool.core import FinishReason
from tests.support.engine_deployment import (
    Deployment,
    collect,
    requests,
    token_ids,
    wanted,
)

LANES = {"num_decode_lanes": 3, "decode_steps": 6}  # a lane for each model, so that none makes the others' runs short


def num_run_steps(deployment: Deployment) -> int:
    """Decode steps of descriptors that asked for several."""
    return sum(count for count in deployment.runs if count > 1)


class Watched(Deployment):
    """Notes how long every decode descriptor is."""

    def __init__(self, *arguments: object, **changes: object) -> None:
        super().__init__(*arguments, **changes)  # type: ignore[arg-type]
        self.runs: list[int] = []
        submit = self.cluster.submit

        def watched(step):
            if step.header.phase == "decode":
                self.runs.append(step.num_steps)
            submit(step)

        self.cluster.submit = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", ["inprocess", "processes"])
async def test_runs_give_the_undivided_models_tokens(directories, undivided, layout):
    async with Watched(directories, layout, **LANES) as deployment:
        todo = requests(9, 30)
        results = await asyncio.gather(*(collect(deployment.engine, request) for request in todo))
        for request, outputs in zip(todo, results, strict=True):
            assert token_ids(outputs) == wanted(undivided[request.model], request)
            assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert num_run_steps(deployment) > 60
        await deployment.until_free()


async def test_a_stop_token_ends_a_run_and_nothing_behind_it_is_told(directories, undivided):
    async with Watched(directories, "processes", **LANES) as deployment:
        [request, *_] = requests(1, 40)
        expected = wanted(undivided[request.model], request)
        place = next(idx for idx in range(20, 40) if expected[idx] not in expected[:idx])
        stop = replace(request.sampling, stop_token_ids=(expected[place],))
        for number in range(3):
            again = replace(request, request_id=f"s{number}", sampling=stop)
            outputs = await collect(deployment.engine, again)
            assert token_ids(outputs) == expected[: place + 1]
            assert outputs[-1].finish_reason is FinishReason.STOP
        assert num_run_steps(deployment) > 30
        await deployment.until_free()


async def test_runs_survive_killed_workers_with_the_very_same_tokens(directories, undivided):
    async with Watched(directories, "processes", **LANES) as deployment:
        todo = requests(6, 80)
        tasks = [asyncio.create_task(collect(deployment.engine, request)) for request in todo]
        for rank in ("w1", "kv0", "w0"):
            lost, steps = deployment.engine.stats().num_ranks_lost, deployment.engine.stats().num_steps
            while deployment.engine.stats().num_steps < steps + 15:
                await asyncio.sleep(0.002)
            deployment.kill(rank)
            while deployment.engine.stats().num_ranks_lost == lost:
                await asyncio.sleep(0.002)
        for request, outputs in zip(todo, await asyncio.gather(*tasks), strict=True):
            assert outputs[-1].error is None, outputs[-1].error
            assert token_ids(outputs) == wanted(undivided[request.model], request)
        assert num_run_steps(deployment) > 60
        await deployment.until_free()
