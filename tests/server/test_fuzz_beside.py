"""Random bodies to one model of a real server while another one answers: its stream stays the same to the token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.server_fixtures import events
from tests.support.tiny_models import write_tiny_model

GOOD = {"model": "Q", "prompt": "the other one", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
NUMBERS = st.integers(-3, 2000) | st.floats() | st.sampled_from([2**63, 1e308, -0.0, 1e-45])
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=20) | st.lists(NUMBERS, max_size=6)
SAMPLING = ["temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs", "stop_token_ids", "min_tokens", "stop"]
SAMPLING += [
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "timeout",
    "stream",
]
PROMPTS = st.text(max_size=200) | st.lists(st.integers(-2, 600), max_size=300) | VALUES
NUM_EXAMPLES = max(10, settings().max_examples // 8)  # an example is a whole answer


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDeployment]:
    root = tmp_path_factory.mktemp("models")
    paths = {
        "P": write_tiny_model(root / "P", "qwen3_moe", num_layers=2),
        "Q": write_tiny_model(root / "Q", "deepseek_v2", num_layers=2),
    }
    config = DeploymentConfig(
        models=tuple(ModelConfig(source=str(path), name=name, page_tokens=16) for name, path in paths.items()),
        pools=PoolsConfig(layout="inprocess", kv_pool_bytes=16 * MiB, frame_bytes=64 * KiB),
    )
    with live_deployment(config) as found:
        yield found


@pytest.fixture(scope="module")
def http(live: LiveDeployment) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=live.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def alone(http: httpx2.Client) -> str:
    return _good_text(http)


def _good_text(http: httpx2.Client) -> str:
    *pieces, done = events(http.post("/v1/completions", json=GOOD).text)
    assert done == "[DONE]"
    return "".join(piece["choices"][0]["text"] for piece in pieces)


@pytest.mark.fuzz
@settings(max_examples=NUM_EXAMPLES)
@given(prompt=PROMPTS, odd=st.dictionaries(st.sampled_from(SAMPLING), VALUES, max_size=5), chat=st.booleans())
def test_another_models_stream_is_the_same_beside_random_bodies(
    http: httpx2.Client, alone: str, prompt: Any, odd: dict[str, Any], chat: bool
) -> None:
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    content = json.dumps({"model": "P", "max_tokens": 8, **asked, **odd}).encode()
    with ThreadPoolExecutor(1) as beside:
        good = beside.submit(_good_text, http)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 408), response.text
        assert good.result(timeout=60) == alone
