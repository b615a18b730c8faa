"""Random bodies: never a 500, never an answer that is not JSON or events, never a request left in the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.support.fake_engine import FakeEngine
from tests.support.server_fixtures import events, fake_app

NAMES = [
    "model prompt messages temperature top_p top_k min_p max_tokens max_completion_tokens min_tokens stop seed",
    "n stream stream_options logprobs top_logprobs logit_bias presence_penalty frequency_penalty",
    "repetition_penalty user echo stop_token_ids ignore_eos include_stop_str_in_output skip_special_tokens",
    "priority suffix best_of tools tool_choice response_format chat_template_kwargs add_generation_prompt",
    "add_special_tokens functions guided_json modalities other timeout",
    "structured_outputs parallel_tool_calls include_reasoning reasoning_effort",
]
FIELDS = " ".join(NAMES).split()
TEXTS = st.text(max_size=30) | st.sampled_from(
    ["tiny", "other", "<|end|>", "\ud83e", "\x00", "\ufeff", "{{ 1 }}", "é" * 5000]
)
NUMBERS = st.integers() | st.integers(-3, 600) | st.floats() | st.sampled_from([2**63, -(2**63), 1e308, -0.0])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "wizard"])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES | VALUES},
        optional={"content": TEXTS | VALUES, "tool_calls": VALUES, "name": VALUES, "reasoning_content": VALUES},
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(("tiny", "other"))


@pytest.fixture(scope="module")
def client(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with TestClient(fake_app(engine, tmp_path_factory.mktemp("models")), raise_server_exceptions=False) as found:
        yield found


@pytest.mark.fuzz
@given(odd=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5), messages=MESSAGES, chat=st.booleans())
def test_random_bodies(client: TestClient, engine: FakeEngine, odd: dict[str, Any], messages: Any, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    base: dict[str, Any] = {"model": "tiny", "max_tokens": 3} | ({"messages": messages} if chat else {"prompt": "hi"})
    content = json.dumps({**base, **odd}).encode()
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert isinstance(error["message"], str)
        assert isinstance(error["code"], str)
        assert len(response.content) < 8000
    elif "text/event-stream" in response.headers["content-type"]:
        assert events(response.text).count("[DONE]") == 1
    else:
        assert response.json()["choices"]
    assert not engine.running


KINDS = ["text", "tool_use", "tool_result", "thinking", "image", "input_text", "output_text", "message"]
KINDS += ["function_call", "function_call_output", "reasoning", "other"]
OTHER_FIELDS = ["system", "tool_choice", "thinking", "stream", "instructions", "text", "reasoning", "stop_sequences"]
BLOCKS = st.lists(
    VALUES
    | st.fixed_dictionaries(
        {"type": st.sampled_from(KINDS)},
        optional={
            "text": VALUES,
            "id": VALUES,
            "name": VALUES,
            "input": VALUES,
            "tool_use_id": VALUES,
            "content": VALUES,
        },
    ),
    max_size=3,
)
TURNS = st.lists(st.fixed_dictionaries({"role": ROLES | VALUES, "content": TEXTS | BLOCKS}), min_size=1, max_size=3)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(KINDS)},
        optional={
            "role": ROLES | VALUES,
            "content": TEXTS | BLOCKS,
            "call_id": VALUES,
            "name": VALUES,
            "arguments": VALUES,
            "output": TEXTS | BLOCKS,
        },
    ),
    min_size=1,
    max_size=3,
)
TOOLS = st.lists(
    VALUES
    | st.fixed_dictionaries(
        {"name": TEXTS, "type": st.sampled_from(["function", "custom"])},
        optional={"input_schema": VALUES, "parameters": VALUES, "description": VALUES},
    ),
    max_size=2,
)


@pytest.mark.fuzz
@given(
    turns=TURNS | VALUES,
    items=ITEMS | VALUES,
    odd=st.dictionaries(
        st.sampled_from(OTHER_FIELDS),
        VALUES,
        max_size=3,
    ),
    tools=st.none() | TOOLS,
)
def test_random_bodies_of_other_shapes(
    client: TestClient, engine: FakeEngine, turns: Any, items: Any, odd: dict[str, Any], tools: Any
) -> None:
    for path, base in (
        ("/v1/messages", {"messages": turns, "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"messages": turns}),
        ("/v1/responses", {"input": items, "max_output_tokens": 3}),
        ("/tokenize", {"messages": turns}),
    ):
        content = json.dumps({"model": "tiny", **base, **odd, "tools": tools}).encode()
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400), (path, response.text)
        if response.status_code == 400:
            assert isinstance(response.json()["error"]["message"], str)
            assert len(response.content) < 8000
        assert not engine.running


@pytest.mark.fuzz
@given(
    content=st.binary(max_size=200)
    | st.text(max_size=200).map(str.encode)
    | VALUES.map(lambda v: json.dumps(v).encode())
)
def test_random_bytes(client: TestClient, content: bytes) -> None:
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
    ):
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
