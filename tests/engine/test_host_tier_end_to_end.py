"""Conversations in a pool that holds two requests, their KV in host memory between turns: tokens of an idle server."""

from __future__ import annotations

import asyncio
import random

import pytest

from crosspool.core import SamplingParams
from crosspool.engine.request import GenerationRequest
from crosspool.models.directory import read_model_dir
from tests.support.engine_deployment import (
    FRAME_BYTES,
    WEIGHTS_RANKS,
    Deployment,
    collect,
    load_undivided,
    token_ids,
    write_models,
)
from tests.support.monolithic import MonolithicModel
from tests.support.tiny_models import write_tiny_model

PAGE_TOKENS = 16
SMALL, HOST = {"kv_budget_bytes": 28 * FRAME_BYTES}, {"host_budget_bytes": 400 * FRAME_BYTES}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("tier"))


@pytest.fixture(scope="module")
def undivided(directories):
    return load_undivided(directories)


class Talk:
    """One conversation, turn after turn."""

    def __init__(self, name: str, model: MonolithicModel, rng: random.Random) -> None:
        self.name, self._model, self._rng = name, model, rng
        self.told: list[int] = []
        self.num_turns = 0

    async def turn(self, engine, num_words: int = 40, max_tokens: int = 6) -> int:
        """One turn; its tokens that were found. Asserts that the answer is the undivided model's."""
        prompt = [*self.told, *(self._rng.randrange(1, 500) for _ in range(num_words))]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.num_turns += 1
        request = GenerationRequest(
            request_id=f"{id(self)}-{self.num_turns}",
            model=self.name,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
        )
        outputs = await collect(engine, request)
        assert outputs[-1].error is None, outputs[-1].error
        assert token_ids(outputs) == self._model.generate(prompt, sampling)
        self.told = [*prompt, *token_ids(outputs)]
        return outputs[-1].usage.cached_tokens


@pytest.mark.parametrize(("layout", "kv_ranks"), [("inprocess", 1), ("processes", 1), ("processes", 2)])
async def test_every_turn_finds_all_of_the_turns_before_although_others_took_the_pool(
    directories, undivided, layout, kv_ranks
):
    rng = random.Random(3)
    names = tuple(f"kv{idx}" for idx in range(kv_ranks))
    async with Deployment(directories, layout, kv_split="one", kv_ranks=names, **SMALL, **HOST) as deployment:
        talks = [Talk(name, undivided[name], rng) for name in sorted(undivided) for _ in range(2)]
        for number in range(4):
            for talk in talks:
                known = max(0, len(talk.told) - 1) // PAGE_TOKENS * PAGE_TOKENS
                assert await talk.turn(deployment.engine) == (known if number else 0)
        assert sum(model.prefix_brought_back for model in deployment.engine.stats().models) > 10
        await deployment.until_free()


@pytest.mark.parametrize(
    "options",
    [
        {"admission": "forecast"},
        {"decode_steps": 4},
        {"prefill_ranks": ("p0",)},
        {"batch_invariant": True, "max_num_batched_tokens": 16},
    ],
    ids=lambda options: next(iter(options)),
)
async def test_conversations_at_once_in_a_tier_that_is_too_small_too(directories, undivided, options):
    rng = random.Random(4)
    sizes = {**SMALL, "host_budget_bytes": 30 * FRAME_BYTES}
    async with Deployment(directories, "inprocess", **sizes, **options) as deployment:

        async def talk(name: str) -> int:
            own = Talk(name, undivided[name], random.Random(rng.randrange(10**6)))
            return sum([await own.turn(deployment.engine, rng.randint(1, 40), rng.randint(1, 12)) for _ in range(5)])

        found = await asyncio.gather(*(talk(name) for name in sorted(undivided) for _ in range(3)))
        assert sum(found) > 200
        assert sum(model.prefix_brought_back for model in deployment.engine.stats().models) > 10
        await deployment.until_free()


async def test_what_a_killed_kv_rank_had_stowed_is_run_again(directories, undivided):
    rng = random.Random(5)
    async with Deployment(directories, "processes", **SMALL, **HOST) as deployment:
        talks = [Talk(name, undivided[name], rng) for name in sorted(undivided)]
        for number in range(4):
            for talk in talks:
                await talk.turn(deployment.engine)
            if number in (1, 2):
                tasks = [asyncio.create_task(talk.turn(deployment.engine, 40, 30)) for talk in talks]
                await asyncio.sleep(0.05 * number)
                deployment.kill("kv0")
                await asyncio.gather(*tasks)
        assert deployment.engine.stats().num_ranks_lost == 2
        await deployment.until_free()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "glm4_moe_lite", "gpt_oss", "olmoe"])
async def test_kv_that_came_back_has_the_logprobs_of_kv_that_was_never_away(tmp_path, family):
    rng = random.Random(6)
    directory = write_tiny_model(tmp_path / family, family)
    whole = MonolithicModel.load(read_model_dir(directory), len(WEIGHTS_RANKS))
    async with Deployment({family: directory}, "inprocess", **SMALL, **HOST) as deployment:
        talk, other = Talk(family, whole, rng), Talk(family, whole, rng)
        await talk.turn(deployment.engine, 150)
        await other.turn(deployment.engine, 300, 2)
        assert await talk.turn(deployment.engine, 20, 24) == 155 // PAGE_TOKENS * PAGE_TOKENS
