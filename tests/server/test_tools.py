"""Tools on a whole server with random models: forced calls, calls cut short, history, refusals, the client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.pools_config import PoolsConfig
from crosspool.server.app import create_app
from crosspool.server.catalogue import Catalogue
from crosspool.units import KiB, MiB
from tests.support.fake_engine import FakeEngine, Script
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.live_server import live_server
from tests.support.server_fixtures import events, tiny_frontend
from tests.support.tiny_models import write_tiny_model
from tests.support.tool_templates import THINKING_TEMPLATE, TOOL_TEMPLATE

BOOK_ROOM = {
    "type": "function",
    "function": {
        "name": "book_room",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Rome"]},
                "nights": {"type": "integer", "minimum": 1, "maximum": 9},
                "notes": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"},
            },
            "required": ["city", "nights", "notes"],
            "additionalProperties": False,
        },
    },
}
LIST_ROOMS = {"type": "function", "function": {"name": "list_rooms", "parameters": {"type": "object", "properties": {},
              "additionalProperties": False}}}  # fmt: skip
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Book."}], "tools": [BOOK_ROOM, LIST_ROOMS], "seed": 4}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDeployment]:
    models = []
    for name, template in (("P", TOOL_TEMPLATE), ("thinker", THINKING_TEMPLATE)):
        directory: Path = write_tiny_model(tmp_path_factory.mktemp(name), "qwen3_moe", num_layers=2)
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
        models.append(ModelConfig(source=str(directory), name=name, page_tokens=16))
    pools = PoolsConfig(layout="inprocess", kv_pool_bytes=16 * MiB, frame_bytes=64 * KiB)
    with live_deployment(DeploymentConfig(models=tuple(models), pools=pools)) as found:
        yield found


@pytest.fixture
async def http(live: LiveDeployment) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=live.url, timeout=60) as client:
        yield client


async def ask(http: httpx2.AsyncClient, **body: Any) -> tuple[dict[str, Any], str]:
    """Message and finish reason, after checking that a stream gives the same."""
    sent = {"model": "P", "max_tokens": 150, "temperature": 1, **ASK, **body}
    response = await http.post("/v1/chat/completions", json=sent)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    streamed = await http.post("/v1/chat/completions", json={**sent, "stream": True})
    joined: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    *pieces, done = events(streamed.text)
    assert done == "[DONE]"
    for piece in pieces:
        delta = piece["choices"][0]["delta"]
        joined["content"] += delta.get("content") or ""
        joined["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(joined["tool_calls"]):
                joined["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                assert call["id"]
            joined["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    message = choice["message"]
    assert joined["content"] == (message["content"] or "")
    assert joined["reasoning"] == message.get("reasoning", "") == message.get("reasoning_content", "")
    assert joined["tool_calls"] == [call["function"] for call in message.get("tool_calls", [])]
    assert pieces[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return message, choice["finish_reason"]


async def test_a_named_tool_is_called_once_with_arguments_of_its_schema(http: httpx2.AsyncClient) -> None:
    choice = {"type": "function", "function": {"name": "book_room"}}
    for sampling in ({"temperature": 0}, {"temperature": 1.4}):
        message, reason = await ask(http, tool_choice=choice, **sampling)
        (call,) = message["tool_calls"]
        assert (reason, call["type"], call["function"]["name"]) == ("tool_calls", "function", "book_room")
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["city"] in ("Oslo", "Rome")
        assert 1 <= arguments["nights"] <= 9
        assert message["content"] is None


async def test_required_calls_some_tool_and_parallel_false_just_one(http: httpx2.AsyncClient) -> None:
    message, reason = await ask(http, tool_choice="required", parallel_tool_calls=False, temperature=1.2)
    assert reason == "tool_calls"
    assert [call["function"]["name"] in ("book_room", "list_rooms") for call in message["tool_calls"]] == [True]
    message, _ = await ask(http, tool_choice="required", max_tokens=200)
    assert len(message["tool_calls"]) >= 1


async def test_a22_a_call_cut_short_is_never_reported_as_complete(http: httpx2.AsyncClient) -> None:
    body = {"tools": [BOOK_ROOM], "tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
    reasons = set()
    for max_tokens in range(4, 121, 4):
        message, reason = await ask(http, **body, max_tokens=max_tokens)
        reasons.add(reason)
        if reason == "tool_calls":
            assert json.loads(message["tool_calls"][0]["function"]["arguments"])["city"] in ("Oslo", "Rome")
        else:
            assert reason == "length"
    assert reasons == {"length", "tool_calls"}


async def test_forced_calls_and_schemas_come_after_the_reasoning_a_prompt_opens(http: httpx2.AsyncClient) -> None:
    # A random model thinks as long as it may, unless it is drawn to the mark that ends it.
    bias = {str(token): 30 for token in (9, 34)}
    message, reason = await ask(http, model="thinker", tool_choice="required", max_tokens=60)
    assert (reason, message.get("tool_calls")) == ("length", None)
    assert message["reasoning"]
    hidden = await http.post(
        "/v1/chat/completions",
        json={"model": "thinker", **ASK, "max_tokens": 20, "include_reasoning": False, "logit_bias": bias},
    )
    assert "reasoning" not in hidden.json()["choices"][0]["message"]


async def test_a09_tool_turns_reach_the_prompt(live: LiveDeployment, http: httpx2.AsyncClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "book_room", "arguments": '{"city": "Oslo"}'}}
    turns = [
        {"role": "user", "content": "Book."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    for with_tools in (True, False):
        body = {"model": "P", "messages": turns, "max_tokens": 2, **({"tools": [BOOK_ROOM]} if with_tools else {})}
        for stream in (False, True):
            response = await http.post("/v1/chat/completions", json={**body, "stream": stream})
            assert response.status_code == 200, response.text


def function(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
    ({"tool_choice": {"name": "book_room"}}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
    ({"tools": [BOOK_ROOM, BOOK_ROOM]}, "tools"),
    ({"tools": [BOOK_ROOM] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": "oops"}}}}],
        },
        "tools[0].function.parameters",
    ),
    (
        {"tool_choice": "required", "tools": [BOOK_ROOM, function("f", x={"type": "array", "uniqueItems": True})]},
        "tools[1].function.parameters.properties.x",
    ),
]


@pytest.mark.parametrize(("change", "param"), BAD)
async def test_tools_that_cannot_be_honoured_are_refused(
    http: httpx2.AsyncClient, change: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = await http.post("/v1/chat/completions", json={"model": "P", **ASK, **change, "stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith(param)


@pytest.fixture(scope="module")
def scripted() -> FakeEngine:
    return FakeEngine(("tiny",))


@pytest.fixture(scope="module")
def client(scripted: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    frontend = tiny_frontend(tmp_path_factory.mktemp("tiny"), config={"chat_template": THINKING_TEMPLATE})
    with (
        live_server(create_app(scripted, Catalogue([frontend]))) as url,
        OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as found,
    ):
        yield found


def test_the_openai_client_reads_reasoning_and_calls(client: OpenAI, scripted: FakeEngine) -> None:
    words = ["I ", "think", "</think>", "\n\nSure", ".\n", "<tool_", 'call>\n{"name": "book_room", ']
    words += ['"arguments": {"ci', 'ty": "Oslo"}', "}\n</tool_call>"]
    scripted.scripts["tiny"] = Script(words=words, once=True)
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK["messages"], "tools": ASK["tools"], "tool_choice": "auto"}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert (message.content, message.model_extra["reasoning"]) == ("Sure.", "I think")
    assert message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert whole.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert final.message.content == "Sure."
    assert final.message.tool_calls[0].function.name == "book_room"
    assert final.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert final.finish_reason == "tool_calls"


def test_without_tools_marks_of_calls_are_text_and_reasoning_is_still_apart(
    client: OpenAI, scripted: FakeEngine
) -> None:
    scripted.scripts["tiny"] = Script(words=["hm</think>", "<tool_call>", "{}"], once=True)
    message = client.chat.completions.create(model="tiny", messages=ASK["messages"]).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("<tool_call>{}", "hm")
    assert message.tool_calls is None
