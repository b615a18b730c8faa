"""The `anthropic` client drives /v1/messages: blocks, events, tools, thinking, counts, and its own error classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic

from crosspool.config import ServerConfig
from crosspool.errors import QueueFullError
from crosspool.server.app import create_app
from crosspool.server.catalogue import Catalogue
from tests.support.fake_engine import FakeEngine, Script
from tests.support.live_server import live_server
from tests.support.server_fixtures import tiny_frontend
from tests.support.tool_templates import THINKING_TEMPLATE

ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": [{"role": "user", "content": "Book."}]}
TOOL: Any = {"name": "book_room", "description": "Books.", "input_schema": {"type": "object", "properties": {}}}
CALL = ["I ", "think</think>", "\n\nSure", ".\n<tool_call>", '\n{"name": "book_room", "argu', 'ments": {"ci', 'ty": 1}',
        "}\n</tool_call>"]  # fmt: skip


@pytest.fixture(scope="module")
def scripted() -> FakeEngine:
    return FakeEngine(("tiny",))


@pytest.fixture(scope="module")
def url(scripted: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    frontend = tiny_frontend(tmp_path_factory.mktemp("tiny"), config={"chat_template": THINKING_TEMPLATE})
    with live_server(create_app(scripted, Catalogue([frontend]), ServerConfig(api_keys=("sk-right",)))) as address:
        yield address


@pytest.fixture
def client(url: str, scripted: FakeEngine) -> Iterator[Anthropic]:
    scripted.scripts["tiny"] = Script(words=["hm</think>", "One", " two"], once=True)
    scripted.requests.clear()
    with Anthropic(base_url=url, api_key="sk-right", max_retries=0) as found:
        yield found


def prompt(scripted: FakeEngine, client: Anthropic) -> str:
    """The text of the last prompt."""
    ids = list(scripted.requests[-1].prompt_token_ids)
    headers = {"Authorization": "Bearer sk-right"}
    text: str = httpx2.post(
        f"{str(client.base_url).rstrip('/')}/detokenize", json={"tokens": ids}, headers=headers
    ).json()["prompt"]
    return text


def test_text_with_every_field(client: Anthropic, scripted: FakeEngine) -> None:
    message = client.messages.create(
        **ASK,
        system=[{"type": "text", "text": "Be brief."}],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
        stop_sequences=["zzz"],
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("hm", "One two")
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    sampling = scripted.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 64)
    assert scripted.requests[0].stop == ("zzz",)
    assert message.usage.input_tokens == len(scripted.requests[0].prompt_token_ids)
    assert message.usage.output_tokens == 3
    assert "<|system|>Be brief.<|end|><|user|>Book.<|end|>" in prompt(scripted, client)


def test_events_build_the_same_message(client: Anthropic, scripted: FakeEngine) -> None:
    for words, tools in ((["hm</think>", "One", " two"], []), (CALL, [TOOL])):
        scripted.scripts["tiny"] = Script(words=words, once=True)
        whole = client.messages.create(**ASK, tools=tools)
        kinds = []
        with client.messages.stream(**ASK, tools=tools) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
        without_ids = [{**block.model_dump(), "id": None} for block in whole.content]
        assert [{**block.model_dump(), "id": None} for block in streamed.content] == without_ids
        assert streamed.stop_reason == whole.stop_reason
        assert streamed.usage.output_tokens == whole.usage.output_tokens == len(words)


def test_a_tool_is_used_and_its_result_comes_back(client: Anthropic, scripted: FakeEngine) -> None:
    scripted.scripts["tiny"] = Script(words=CALL, once=True)
    message = client.messages.create(**ASK, tools=[TOOL])
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    used = message.content[2]
    assert (used.name, used.input, message.stop_reason) == ("book_room", {"city": 1}, "tool_use")
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "done"},
                                     {"type": "text", "text": "And?"}]},
    ]  # fmt: skip
    client.messages.create(**{**ASK, "messages": history}, tools=[TOOL])
    text = prompt(scripted, client)
    assert '"arguments": {"city": 1}' in text
    assert text.index("<|tool|>done") < text.index("<|user|>And?")


def test_a_forced_tool_is_a_grammar(client: Anthropic, scripted: FakeEngine) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "book_room", "disable_parallel_tool_use": True}):
        client.messages.create(**ASK, tools=[TOOL], tool_choice=choice)  # type: ignore[arg-type]
        assert scripted.requests[-1].constraint is not None
    client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "none"})
    assert scripted.requests[-1].constraint is None


def test_a_form_is_a_grammar_at_either_of_its_places(url: str, scripted: FakeEngine) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    for asked in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        answer = httpx2.post(f"{url}/v1/messages", json={**ASK, **asked}, headers={"x-api-key": "sk-right"})
        assert answer.status_code == 200, answer.text
        assert scripted.requests[-1].constraint is not None


def test_stop_reasons(client: Anthropic, scripted: FakeEngine) -> None:
    message = client.messages.create(**{**ASK, "max_tokens": 2})
    assert (message.stop_reason, message.content[-1].text) == ("max_tokens", "One")
    scripted.scripts["tiny"] = Script(words=CALL, once=True)
    cut = client.messages.create(**{**ASK, "max_tokens": 6}, tools=[TOOL])
    assert (cut.stop_reason, cut.content[-1].type, cut.content[-1].input) == ("max_tokens", "tool_use", {})


def test_tokens_are_counted(client: Anthropic, scripted: FakeEngine) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=ASK["messages"], tools=[TOOL]).input_tokens
    client.messages.create(**ASK, tools=[TOOL])
    assert counted == len(scripted.requests[-1].prompt_token_ids)


def test_errors_have_the_clients_own_classes(client: Anthropic, url: str, scripted: FakeEngine) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served"):
        client.messages.create(**{**ASK, "model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ASK, extra_body={"temperature": 1.5})
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": [image]}]})
    with (
        pytest.raises(anthropic.AuthenticationError) as unknown,
        Anthropic(base_url=url, api_key="wrong", max_retries=0) as other,
    ):
        other.messages.create(**ASK)
    assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    with pytest.raises(anthropic.RequestTooLargeError) as large:
        client.messages.create(**{**ASK, "system": "x" * (9 << 20)})
    assert large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
    scripted.scripts["tiny"].refusal = QueueFullError("the queue of tiny is full", retry_after_s=3)
    with pytest.raises(anthropic.RateLimitError) as caught:
        client.messages.create(**ASK)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "the queue of tiny is full"},
        "request_id": caught.value.request_id,
    }


def test_answers_and_errors_have_the_id_that_the_log_has(client: Anthropic, scripted: FakeEngine) -> None:
    headers = {"X-Request-Id": "mine-1"}
    assert client.messages.create(**ASK, extra_headers=headers)._request_id == "mine-1"
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ASK, "model": "nobody"}, extra_headers=headers)
    assert caught.value.request_id == "mine-1"
    assert caught.value.body["request_id"] == "mine-1"  # type: ignore[index]


def test_models_have_the_clients_fields(client: Anthropic, scripted: FakeEngine) -> None:
    page = client.models.list()
    (model,) = page
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert model.created_at.tzinfo is not None
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "tiny")
    assert client.models.retrieve("tiny") == model


def test_a20_a_failure_in_mid_stream_is_one_error_event(client: Anthropic, scripted: FakeEngine) -> None:
    scripted.scripts["tiny"] = Script(words=["hm</think>", "One"], fail_after=3)
    with pytest.raises(anthropic.APIStatusError, match="scripted"), client.messages.stream(**ASK) as stream:
        for _ in stream:
            pass
    assert scripted.running == {}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"system": 5}, "system"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "two words", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "book", "input_schema": 5}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, 'tool_choice "any" needs tools'),
    ({"tool_choice": {"type": "always"}}, "tool_choice"),
    ({"thinking": {"type": "deep"}}, "thinking"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"output_config": {"format": False}}, "output_config.format"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nosuch"}}}},
        "output_config.format.schema.type",
    ),
    ({"regex": "a"}, "say the answer's form in output_config.format"),
    ({"output_config": {"effort": 3}}, "output_config.effort"),
    ({"stop": ["a"]}, "stop is not taken here; send stop_sequences"),
    ({"max_output_tokens": 5}, "max_output_tokens is not taken here; send max_tokens"),
    ({"parallel_tool_calls": False}, "send disable_parallel_tool_use in tool_choice"),
    ({"timeout": 3}, "send the header X-Request-Timeout"),
    ({"seed": 7}, "seed is not taken here; /v1/chat/completions takes it"),
    ({"mcp_servers": [{"type": "url", "name": "x", "url": "http://x"}]}, "mcp_servers"),
]


@pytest.mark.parametrize(("change", "place"), BAD)
def test_wrong_bodies_are_400_in_anthropics_shape(url: str, change: dict[str, Any], place: str) -> None:
    response = httpx2.post(f"{url}/v1/messages", json={**ASK, **change}, headers={"x-api-key": "sk-right"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert place in response.json()["error"]["message"]
