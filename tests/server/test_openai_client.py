"""The `openai` client drives every field: its own classes for answers, chunks and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from crosspool.errors import QueueFullError, WorkerLostError
from tests.support.fake_engine import FakeEngine, Script
from tests.support.live_server import live_server
from tests.support.server_fixtures import fake_app

MESSAGES: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]


@pytest.fixture(scope="module")
def scripted() -> FakeEngine:
    return FakeEngine(("tiny", "other"))


@pytest.fixture(scope="module")
def url(scripted: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("models")
    with live_server(fake_app(scripted, directory, api_keys=("sk-right",))) as address:
        yield address


@pytest.fixture
def client(url: str, scripted: FakeEngine) -> Iterator[OpenAI]:
    scripted.scripts = {name: Script() for name in scripted.scripts}
    scripted.requests.clear()
    with OpenAI(base_url=f"{url}/v1", api_key="sk-right", max_retries=0) as found:
        yield found


def test_chat_with_every_field(client: OpenAI, scripted: FakeEngine) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0.5,
        top_p=0.9,
        max_tokens=3,
        max_completion_tokens=4,
        stop=["zzz"],
        seed=7,
        n=2,
        logprobs=True,
        top_logprobs=3,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"11": 2},
        user="me",
        extra_body={
            "ignore_eos": True,
            "min_tokens": 1,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "stop_token_ids": [3],
            "chat_template_kwargs": {"enable_thinking": False},
            "include_stop_str_in_output": True,
        },
    )
    assert [choice.message.content for choice in answer.choices] == ["One two three four"] * 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(item.top_logprobs) for item in logprobs.content] == [3] * 4
    sampling = scripted.requests[0].sampling
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.top_k, sampling.max_tokens) == (True, 1, 5, 4)


def test_chat_stream_with_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="other", messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "One two three four"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4


def test_completions_with_every_field(client: OpenAI, scripted: FakeEngine) -> None:
    answer = client.completions.create(
        model="nickname",
        prompt=["a", "b"],
        max_tokens=4,
        temperature=0,
        top_p=1,
        n=2,
        logprobs=2,
        stop="zzz",
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={"11": 2},
        seed=3,
        echo=False,
        user="me",
    )
    assert answer.model == "tiny"  # an alias answers under the model's own name
    assert [choice.text for choice in answer.choices] == ["One two three four"] * 4
    assert answer.choices[3].logprobs is not None
    assert len(answer.choices[3].logprobs.tokens or []) == 4
    assert [request.seed for request in scripted.requests] == [3, 3]


def test_completion_stream(client: OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="a", max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "One two three four"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_models(client: OpenAI) -> None:
    found = client.models.list().data
    assert [model.id for model in found] == ["tiny", "other"]
    card = client.models.retrieve("nickname")
    assert card.id == "tiny"
    extra = card.model_extra or {}
    assert extra["max_model_len"] == 1024
    assert extra["crosspool"]["state"] == "ready"
    assert extra["crosspool"]["weights_bytes"] == 300


def test_error_classes_and_codes(client: OpenAI, url: str, scripted: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.AuthenticationError) as unknown:
        OpenAI(base_url=f"{url}/v1", api_key="sk-wrong", max_retries=0).models.list()
    assert unknown.value.code == "invalid_api_key"
    scripted.scripts["tiny"] = Script(refusal=QueueFullError("full"))
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert full.value.response.headers["retry-after"] == "1"
    scripted.scripts["tiny"] = Script(refusal=WorkerLostError("gone"))
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=MESSAGES)


def test_a_failure_in_mid_stream_raises_in_the_client(client: OpenAI, scripted: FakeEngine) -> None:
    scripted.scripts["tiny"] = Script(fail_after=2)
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the step failed"):
        list(stream)
