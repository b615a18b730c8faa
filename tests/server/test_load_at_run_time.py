"""A real engine takes models in and lets them go while it serves another one, and gives their memory back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from crosspool.config import DeploymentConfig, ModelConfig, ServerConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.awaited import soon
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.tiny_models import write_tiny_model

ROUNDS = 5


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "Q": write_tiny_model(root / "Q", "qwen3_moe", num_layers=2, max_position_embeddings=1024),
        "P": write_tiny_model(root / "P", "deepseek_v2", num_layers=2, max_position_embeddings=1024),
    }


@pytest.fixture
def live(directories: dict[str, Path]) -> Iterator[LiveDeployment]:
    config = DeploymentConfig(
        models=(ModelConfig(source=str(directories["Q"]), page_tokens=16),),
        pools=PoolsConfig(layout="inprocess", kv_pool_bytes=32 * MiB, frame_bytes=64 * KiB),
        server=ServerConfig(admin_api_keys=("boss",)),
    )
    with live_deployment(config) as found:
        yield found


def num_accepted(live: LiveDeployment, model: str) -> int:
    """Since it was loaded."""
    return sum(load.num_accepted for load in live.stats().models if load.name == model)


async def test_a48_memory_comes_back_round_after_round_while_another_model_serves(
    live: LiveDeployment, directories: dict[str, Path]
) -> None:
    headers = {"Authorization": "Bearer boss"}
    async with httpx2.AsyncClient(base_url=live.url, headers=headers, timeout=30) as http:

        async def ask(model: str, max_tokens: int = 12) -> httpx2.Response:
            body = {"model": model, "prompt": "the sea", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            return await http.post("/v1/completions", json=body)

        alone = (await ask("Q")).json()["choices"][0]["text"]
        baseline = live.engine.memory_bytes()
        answers = set()
        for _ in range(ROUNDS):
            beside = [asyncio.create_task(ask("Q")) for _ in range(3)]
            loaded = await http.post("/admin/models/P/load", json={"path": str(directories["P"]), "page_tokens": 16})
            assert loaded.status_code == 200, loaded.text
            answers.add((await ask("P")).json()["choices"][0]["text"])
            running = asyncio.create_task(ask("P", max_tokens=60))
            await soon(lambda: num_accepted(live, "P") == 2)
            assert (await http.post("/admin/models/P/unload")).status_code == 200
            assert (await running).json()["usage"]["completion_tokens"] == 60  # it was let end
            assert (await ask("P")).status_code == 404
            assert {(await answer).json()["choices"][0]["text"] for answer in beside} == {alone}
            await soon(lambda: live.engine.memory_bytes() == baseline, live.engine.memory_bytes)
        assert len(answers) == 1


async def test_a_model_can_be_ended_without_draining(live: LiveDeployment, directories: dict[str, Path]) -> None:
    headers = {"Authorization": "Bearer boss"}
    async with httpx2.AsyncClient(base_url=live.url, headers=headers, timeout=30) as http:
        await http.post("/admin/models/P/load", json={"path": str(directories["P"]), "page_tokens": 16})
        body = {"model": "P", "prompt": "the sea", "max_tokens": 500, "ignore_eos": True}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        await soon(lambda: num_accepted(live, "P") == 1)
        assert (await http.post("/admin/models/P/unload", json={"drain": False})).status_code == 200
        ended = await running
        assert (ended.status_code, ended.json()["error"]["code"]) == (503, "model_removed")
