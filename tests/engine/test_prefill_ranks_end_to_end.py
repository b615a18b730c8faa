"""Prompts on prefill ranks: the tokens of the undivided models, whatever is cached before and whoever is lost."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from crosspool.core import SamplingParams
from crosspool.engine.request import GenerationRequest
from crosspool.models.directory import read_model_dir
from tests.support.awaited import soon
from tests.support.engine_deployment import (
    FAMILIES,
    WEIGHTS_RANKS,
    Deployment,
    collect,
    requests,
    token_ids,
    wanted,
)
from tests.support.monolithic import MonolithicModel
from tests.support.tiny_models import write_tiny_model


def count_dedicated(deployment: Deployment) -> None:
    deployment.num_dedicated = deployment.num_inline = 0
    submit = deployment.cluster.submit

    def counted(step):
        deployment.num_dedicated += step.header.prefill_rank is not None
        deployment.num_inline += step.header.prefill_rank is None and step.header.phase == "prefill"
        submit(step)

    deployment.cluster.submit = counted


@pytest.mark.parametrize("layout", ["inprocess", "processes"])
@pytest.mark.parametrize("changes", [{}, {"prefill_ranks": ("p0", "p1"), "num_prefill_lanes": 2}])
async def test_prompts_of_a_prefill_rank_give_the_undivided_models_tokens(directories, undivided, layout, changes):
    async with Deployment(directories, layout, **({"prefill_ranks": ("p0",)} | changes)) as deployment:
        count_dedicated(deployment)
        plans = requests(12, 8)
        answers = await asyncio.gather(*(collect(deployment.engine, plan) for plan in plans))
        for plan, outputs in zip(plans, answers, strict=True):
            assert token_ids(outputs) == wanted(undivided[plan.model], plan), plan.request_id
        assert deployment.num_dedicated >= 12
        assert deployment.num_inline == 0
        await deployment.until_free()


def a_request(number: int, model: str, prompt: list[int]) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id=f"p{number}", model=model, prompt_token_ids=tuple(prompt), sampling=sampling)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss", "olmoe"])
async def test_cached_pages_are_handed_to_the_prefill_rank(tmp_path, family):
    directory = write_tiny_model(tmp_path / family, family)
    model = MonolithicModel.load(read_model_dir(directory), len(WEIGHTS_RANKS))
    rng = random.Random(family)
    shared = [rng.randrange(1, 500) for _ in range(70)]
    plans = [a_request(n, family, shared + [rng.randrange(1, 500) for _ in range(3 + 20 * n)]) for n in range(4)]
    async with Deployment({family: directory}, "processes", prefill_ranks=("p0",)) as deployment:
        count_dedicated(deployment)
        first = await collect(deployment.engine, plans[0])
        rest = await asyncio.gather(*(collect(deployment.engine, plan) for plan in plans[1:]))
        for plan, outputs in zip(plans, [first, *rest], strict=True):
            assert token_ids(outputs) == wanted(model, plan), plan.request_id
        assert all(outputs[-1].usage.cached_tokens >= 64 for outputs in rest)
        assert deployment.num_inline == 0


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_prefill_rank_costs_no_request_and_is_used_again(directories, undivided, kind):
    async with Deployment(directories, "processes", prefill_ranks=("p0",), default_deadline_s=None) as deployment:
        count_dedicated(deployment)
        plans = requests(9, 8)

        async def round_of(tag: str) -> None:
            mine = [replace_id(plan, f"{tag}-{plan.request_id}") for plan in plans]
            answers = await asyncio.gather(*(collect(deployment.engine, plan) for plan in mine))
            for plan, outputs in zip(mine, answers, strict=True):
                assert token_ids(outputs) == wanted(undivided[plan.model], plan), plan.request_id

        running = asyncio.create_task(round_of("hurt"))
        await asyncio.sleep(0.03)
        deployment.kill("p0", kind)
        await running
        await round_of("meanwhile")
        await soon(lambda: not deployment.engine.stats().ranks_down, deployment.engine.stats)
        before = deployment.num_dedicated
        await round_of("after")
        assert deployment.num_dedicated > before, "the prefill rank is back and is not used"
        assert set(FAMILIES) == {info.name for info in deployment.engine.models() if info.state == "ready"}
        await deployment.until_free()


def replace_id(plan: GenerationRequest, request_id: str) -> GenerationRequest:
    from dataclasses import replace

    return replace(plan, request_id=request_id)
