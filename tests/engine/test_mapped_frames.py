"""Three real models on frames that are mapped for each of them: the tokens of an arena, and nobody waits in decode."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx2
import pytest

from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig
from crosspool.engine.limit_change import LimitChange
from crosspool.pools_config import KVBacking, PoolsConfig
from crosspool.units import KiB
from tests.support.awaited import PATIENCE_S
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.tiny_models import write_tiny_model

FAMILIES = {"P": "deepseek_v2", "Q": "qwen3_moe", "R": "glm4_moe_lite"}
SHORT, AMPLE = 60, 600
"""Frames of a pool that fifteen requests fill many times over, and of one that they do not."""
PAGES, LONG_PAGES = (16, 8, 32), (32, 32, 32)
"""Tokens of each model's pages. Prompts end at the beginning of a long page, so that the next one, hinted at from the
start, is needed 27 steps later: a busy machine may hold up the mapper's thread for a few."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny_model(root / name, family, num_layers=2, max_position_embeddings=1024)
        for name, family in FAMILIES.items()
    }


def deployment(
    directories: dict[str, Path],
    backing: KVBacking,
    num_frames: int = SHORT,
    layout: str = "inprocess",
    page_tokens: tuple[int, ...] = PAGES,
) -> DeploymentConfig:
    return DeploymentConfig(
        models=tuple(
            ModelConfig(source=str(path), page_tokens=tokens)
            for path, tokens in zip(directories.values(), page_tokens, strict=True)
        ),
        pools=PoolsConfig(
            layout=layout, kv_pool_bytes=(num_frames + 1) * 64 * KiB, frame_bytes=64 * KiB, kv_backing=backing
        ),
        scheduling=SchedulingConfig(max_num_seqs=6, max_num_batched_tokens=64),
    )


async def answers(live: LiveDeployment) -> list[list[int]]:
    """Greedy tokens of waves of requests that move the pool from model to model and back."""
    async with httpx2.AsyncClient(base_url=live.url, timeout=60) as http:

        async def ask(model: str, number: int) -> list[int]:
            prompt = [(7 * number + position) % 300 + 5 for position in range(33 + number)]
            body = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            answer = await http.post("/v1/completions", json={**body, "logprobs": 1})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["logprobs"]["tokens"]

        found = []
        for wave in ("PQR", "P", "Q", "R", "PQ"):
            found += await asyncio.gather(*(ask(model, number) for model in wave for number in range(5)))
        return found


@pytest.fixture(scope="module")
def expected(directories: dict[str, Path]) -> list[list[int]]:
    """What an arena answers."""
    with live_deployment(deployment(directories, "arena")) as live:
        found = asyncio.run(answers(live))
        assert not live.stats().backings
    return found


@pytest.mark.parametrize("layout", ["inprocess", "processes"])
async def test_frames_that_move_from_model_to_model_give_the_tokens_of_an_arena(
    expected: list[list[int]], directories: dict[str, Path], layout: str
) -> None:
    with live_deployment(deployment(directories, "vmm", SHORT, layout)) as live:
        assert await answers(live) == expected
        counts = live.stats().backings["kv0"]
        assert counts.maps > 30
        assert counts.unmaps > 30
        assert counts.failures == 0


@pytest.mark.parametrize("layout", ["inprocess", "processes"])
async def test_while_frames_are_free_no_decode_step_waits_for_a_page_to_be_mapped(
    expected: list[list[int]], directories: dict[str, Path], layout: str
) -> None:
    with live_deployment(deployment(directories, "vmm", AMPLE, layout, LONG_PAGES)) as live:
        assert await answers(live) == expected
        counts = live.stats().backings["kv0"]
        assert counts.maps > 30
        assert (counts.decode_waits, counts.full_waits) == (0, 0), counts
        async with httpx2.AsyncClient(base_url=live.url) as http:
            text = (await http.get("/metrics")).text
        assert 'crosspool:kv_mapping_waits_total{path="decode",rank="kv0"} 0.0' in text
        assert 'crosspool:kv_budget_bytes{rank="kv0"}' in text


async def test_after_the_kv_rank_was_killed_nothing_is_lost_and_pages_are_mapped_ahead_again(
    directories: dict[str, Path],
) -> None:
    with live_deployment(deployment(directories, "vmm", AMPLE, "processes", LONG_PAGES)) as live:
        async with httpx2.AsyncClient(base_url=live.url, timeout=60) as http:

            async def ask(model: str) -> str:
                body = {"model": model, "prompt": [7, 8, 9] * 11, "max_tokens": 300, "temperature": 0}
                answer = await http.post("/v1/completions", json={**body, "ignore_eos": True})
                return answer.json()["choices"][0]["text"]

            undisturbed = {model: await ask(model) for model in "PQR"}
            running = [asyncio.create_task(ask(model)) for model in "PQRPQR"]
            while not any(load.num_decoding for load in live.stats().models):
                await asyncio.sleep(0.002)
            cluster = live.engine.engine._cluster
            os.kill(cluster.pids()["kv0"], signal.SIGKILL)
            assert [await answer for answer in running] == [undisturbed[model] for model in "PQRPQR"]
        stats = live.stats()
        assert stats.num_ranks_lost == 1
        counts = stats.backings["kv0"]
        assert counts.maps > 30
        assert (counts.decode_waits, counts.full_waits) == (0, 0), counts


async def until_absent(live: LiveDeployment, num_frames: int) -> None:
    """The mapper's thread may be late, and ranks tell of it after steps alone: so there are more of them."""
    async with asyncio.timeout(PATIENCE_S):
        while live.stats().backings["kv0"].absent_frames != num_frames:
            await answers(live)


@pytest.mark.parametrize("layout", ["inprocess", "processes"])
async def test_memory_beyond_the_budget_goes_back_to_the_driver_and_comes_again(
    expected: list[list[int]], directories: dict[str, Path], layout: str
) -> None:
    with live_deployment(deployment(directories, "vmm", AMPLE, layout)) as live:
        live.engine.set_limits(LimitChange(budget_bytes=SHORT * 64 * KiB))
        assert await answers(live) == expected
        await until_absent(live, AMPLE - SHORT)
        kv_cache = live.engine.memory_bytes()["kv0"]["kv_cache"]
        assert kv_cache == (SHORT + 1) * 64 * KiB
        live.engine.set_limits(LimitChange(budget_bytes=AMPLE * 64 * KiB))
        assert await answers(live) == expected
        await until_absent(live, 0)
        assert live.stats().backings["kv0"].failures == 0


async def test_a_model_that_goes_gives_its_range_back(expected: list[list[int]], directories: dict[str, Path]) -> None:
    with live_deployment(deployment(directories, "vmm")) as live:
        assert await answers(live) == expected
        await live.engine.remove_model("P")
        served = next(model for model in _served(directories) if model.name == "P")
        await live.engine.add_model(served)
        assert await answers(live) == expected


def _served(directories: dict[str, Path]) -> list:
    from crosspool.deployment.prepared_model import prepare_models

    return [model.served for model in prepare_models(deployment(directories, "vmm"))]
