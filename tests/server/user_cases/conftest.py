"""What hurts people who serve several models, as requests to a whole server: real engine, real workers, real HTTP.

P and Q are tiny random models on one pair of pools. After every bad input a good request to each must still be right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.tiny_models import write_tiny_model
from tests.support.user_case_client import CONTEXT, connect, deployment, good_answers, until_idle


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "P": write_tiny_model(root / "P", "qwen3_moe", num_layers=2, max_position_embeddings=CONTEXT),
        "Q": write_tiny_model(root / "Q", "deepseek_v2", num_layers=2, max_position_embeddings=CONTEXT),
    }


@pytest.fixture(scope="module")
def live(directories: dict[str, Path]) -> Iterator[LiveDeployment]:
    with live_deployment(deployment(directories)) as found:
        yield found


@pytest.fixture
async def http(live: LiveDeployment) -> AsyncIterator[httpx2.AsyncClient]:
    """A client; what good requests answer is checked again when the test is over, and nothing may be left running."""
    async with connect(live) as client:
        before = await good_answers(client)
        yield client
        await until_idle(live)
        assert await good_answers(client) == before
