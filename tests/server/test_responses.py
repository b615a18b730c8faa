"""The `openai` client drives /v1/responses: items, events, tools, forms; what would have to be kept is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from crosspool.server.app import create_app
from crosspool.server.catalogue import Catalogue
from tests.support.fake_engine import FakeEngine, Script
from tests.support.live_server import live_server
from tests.support.server_fixtures import tiny_frontend
from tests.support.tool_templates import THINKING_TEMPLATE

TOOL: Any = {"type": "function", "name": "book", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = [
    "hm</think>",
    "\n\nSure.\n",
    "<tool_call>\n",
    '{"name": "book", "arguments": {"ci',
    'ty": 1}}',
    "\n</tool_call>",
]


@pytest.fixture(scope="module")
def scripted() -> FakeEngine:
    return FakeEngine(("tiny",))


@pytest.fixture(scope="module")
def served(scripted: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    frontend = tiny_frontend(tmp_path_factory.mktemp("tiny"), config={"chat_template": THINKING_TEMPLATE})
    with live_server(create_app(scripted, Catalogue([frontend]))) as url:
        yield url


@pytest.fixture
def client(served: str, scripted: FakeEngine) -> Iterator[OpenAI]:
    scripted.scripts["tiny"] = Script(words=["hm</think>", "One", " two"], once=True)
    scripted.requests.clear()
    with OpenAI(base_url=f"{served}/v1", api_key="any", max_retries=0) as found:
        yield found


def items(response: Any) -> list[Any]:
    """The output without random ids, and without what the client's streams add."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            dropped = ("id", "call_id", "parsed", "parsed_arguments")
            return {key: plain(item) for key, item in value.items() if key not in dropped and item is not None}
        return value

    return [plain(item.model_dump()) for item in response.output]


def test_an_answer_with_every_field(client: OpenAI, scripted: FakeEngine) -> None:
    response = client.responses.create(
        model="tiny", input="hi", instructions="Be brief.", max_output_tokens=9, temperature=0.5, top_p=0.9
    )
    assert (response.output_text, response.status, response.store) == ("One two", "completed", False)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage is not None
    assert response.usage.output_tokens == 3
    sampling = scripted.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.9)
    cut = client.responses.create(model="tiny", input="hi", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]


@pytest.mark.parametrize("words", [["hm</think>", "One", " two"], CALL])
def test_events_build_the_same_items(client: OpenAI, scripted: FakeEngine, words: list[str]) -> None:
    scripted.scripts["tiny"] = Script(words=words, once=True)
    whole = client.responses.create(model="tiny", input="hi", tools=[TOOL])
    with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert items(final) == items(whole)
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(whole.output)


def test_a_call_and_its_result(client: OpenAI, scripted: FakeEngine) -> None:
    scripted.scripts["tiny"] = Script(words=CALL, once=True)
    response = client.responses.create(model="tiny", input="hi", tools=[TOOL])
    call = response.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "book", '{"city": 1}')  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}  # type: ignore[union-attr]
    history: Any = [{"role": "user", "content": "hi"}, *[item.model_dump() for item in response.output], result]
    again = client.responses.create(model="tiny", input=history, tools=[TOOL])
    assert again.status == "completed"
    assert len(scripted.requests[1].prompt_token_ids) > len(scripted.requests[0].prompt_token_ids)


def test_forms_and_forced_calls_are_grammars(client: OpenAI, scripted: FakeEngine) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    client.responses.create(
        model="tiny", input="hi", text={"format": {"type": "json_schema", "name": "it", "schema": schema}}
    )
    client.responses.create(model="tiny", input="hi", tools=[TOOL], tool_choice={"type": "function", "name": "book"})
    assert all(request.constraint is not None for request in scripted.requests)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs"),
        ({"guided_json": {}, "regex": "a"}, "regex"),
        (
            {"text": {"format": {"type": "json_schema", "name": "it", "schema": {"type": "nosuch"}}}},
            "text.format.schema.type",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "it"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL]}, "text.format"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"instructions": "Be brief.", "input": [{"role": "wizard", "content": "a"}]}, "input"),
        ({"input": "a" * 1_000_000}, "input has 1000000 characters"),
        ({"max_output_tokens": 10**6}, "lower max_output_tokens"),
        ({"tools": [{**TOOL, "name": "two words"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "always"}}, '{"type": "function", "name": ...}'),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_words_of_this_api(
    client: OpenAI, change: dict[str, Any], place: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"model": "tiny", "input": "hi", **change}, cast_to=object)
    error: Any = caught.value.body
    assert place in error["message"]
    words_of_chat = ("response_format", "structured_outputs", "messages", "max_tokens", "reasoning_effort", ".function")
    assert not [word for word in words_of_chat if word in f"{error['message']} {error['param']}"]


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("max_tokens", 5, "send max_output_tokens"),
        ("max_completion_tokens", 5, "send max_output_tokens"),
        ("messages", [{"role": "user", "content": "hi"}], "send input"),
        ("response_format", {"type": "json_object"}, "send text.format"),
        ("system", "Be brief.", "send instructions"),
        ("seed", 7, "/v1/chat/completions takes it"),
        ("n", 2, "/v1/chat/completions takes it"),
    ],
)
def test_a_field_of_another_route_is_refused_with_its_name_here(
    client: OpenAI, field: str, value: Any, remedy: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="hi", max_output_tokens=9, extra_body={field: value})
    error: Any = caught.value.body
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert error["message"].startswith(f"{field} is not taken here; ")
    assert remedy in error["message"]


def test_fields_of_another_route_that_change_nothing_are_taken(client: OpenAI) -> None:
    neutral = {"max_tokens": 9, "n": 1, "frequency_penalty": 0, "stop": [], "user": "u", "client_metadata": {"a": "b"}}
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=9, extra_body=neutral)
    assert response.status == "completed"


def test_a20_a_failure_in_mid_stream_is_one_failed_event(client: OpenAI, scripted: FakeEngine) -> None:
    scripted.scripts["tiny"] = Script(words=["hm</think>", "One"], fail_after=3)
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert [item.status for item in events[-1].response.output] == ["completed", "incomplete"]
    assert scripted.running == {}
