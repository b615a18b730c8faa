"""Answers in a grammar, down to the sampler: whole servers with random models, whose every token the mask decides."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.server_fixtures import events
from tests.support.tiny_models import write_tiny_model

ROOM = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "nights": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "nights"],
    "additionalProperties": False,
}
BODY = {"model": "P", "messages": [{"role": "user", "content": "Book."}], "max_tokens": 80}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDeployment]:
    directory: Path = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_layers=2)
    pools = PoolsConfig(layout="inprocess", kv_pool_bytes=16 * MiB, frame_bytes=64 * KiB)
    models = (ModelConfig(source=str(directory), name="P", page_tokens=16),)
    with live_deployment(DeploymentConfig(models=models, pools=pools)) as found:
        yield found


@pytest.fixture
async def http(live: LiveDeployment) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=live.url, timeout=60) as client:
        yield client


async def answer(http: httpx2.AsyncClient, **body: Any) -> tuple[str, str]:
    """Text and finish reason, the same streamed and not."""
    whole = await http.post("/v1/chat/completions", json={**BODY, "seed": 5, **body})
    assert whole.status_code == 200, whole.text
    streamed = await http.post("/v1/chat/completions", json={**BODY, "seed": 5, **body, "stream": True})
    pieces = [event["choices"][0] for event in events(streamed.text)[:-1]]
    (choice,) = whole.json()["choices"]
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == choice["message"]["content"]
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]
    return choice["message"]["content"], choice["finish_reason"]


def response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.3}, {"repetition_penalty": 1.9, "top_k": 3}]
)
async def test_a_schema_is_followed_however_tokens_are_drawn(
    http: httpx2.AsyncClient, sampling: dict[str, Any]
) -> None:
    text, reason = await answer(http, response_format=response_format(ROOM), **sampling)
    found = json.loads(text)
    assert found["city"] in ("Oslo", "Rome")
    assert 1 <= found["nights"] <= 9
    assert reason == "stop"


async def test_a_format_that_nobody_checks_is_a_remark(http: httpx2.AsyncClient) -> None:
    path = {"type": "string", "format": "path", "maxLength": 3}
    schema = {"type": "array", "prefixItems": [path, {"const": {"format": "path"}}], "items": False, "minItems": 2}
    text, _ = await answer(http, response_format=response_format(schema), temperature=0)
    first, second = json.loads(text)
    assert (len(first) <= 3, second) == (True, {"format": "path"})
    when = {"type": "string", "format": "date"}
    text, _ = await answer(http, response_format=response_format(when), temperature=1.5, seed=1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", json.loads(text))


async def test_json_object_regex_choice_and_grammar(http: httpx2.AsyncClient) -> None:
    text, _ = await answer(http, structured_outputs={"regex": "(ab){2}c?x"}, temperature=1.5)
    assert text in ("ababx", "ababcx")
    text, _ = await answer(http, structured_outputs={"choice": ['maybe "so"', "nö"]}, temperature=1.5)
    assert text in ('maybe "so"', "nö")
    text, _ = await answer(http, structured_outputs={"grammar": 'start: "x" DIGIT "y"\nDIGIT: /[0-9]/'})
    assert text[0] + text[2:] == "xy"
    text, _ = await answer(
        http, structured_outputs={"json": json.dumps({"type": "integer", "maximum": 9, "minimum": 0})}
    )
    assert json.loads(text) in range(10)
    text, reason = await answer(http, response_format={"type": "json_object"}, logit_bias={str(97): 100})
    assert json.loads(text) == {} or reason == "length"
    assert text.startswith("{")


async def test_n_choices_follow_each_their_own_place_and_neighbours_are_free(http: httpx2.AsyncClient) -> None:
    several = {**BODY, "n": 3, "temperature": 1.5, "seed": 3, "response_format": response_format(ROOM)}
    plain = {**BODY, "temperature": 0, "max_tokens": 30}
    before = (await http.post("/v1/chat/completions", json=plain)).json()["choices"]
    answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in (several, plain)))
    found = [json.loads(choice["message"]["content"]) for choice in answers[0].json()["choices"]]
    assert all(set(item) == {"city", "nights"} for item in found)
    assert answers[1].json()["choices"] == before


async def test_log_probabilities_stay_those_of_the_model(http: httpx2.AsyncClient) -> None:
    body = {**BODY, "structured_outputs": {"choice": ["ok"]}, "logprobs": True, "top_logprobs": 1, "temperature": 0}
    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    tokens = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "ok"
    assert all(-100 < token["logprob"] < 0 for token in tokens)
    assert any(token["top_logprobs"][0]["logprob"] > token["logprob"] for token in tokens)


def deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": "oops"}}, "schema.properties.a"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "[a-"}}}, "schema.properties.a"),
    ({"type": "array", "items": {"type": "nosuch"}}, "schema.items.type"),
    ({"type": "object", "properties": {"b": {"$ref": "#/$defs/none"}}}, "schema.properties.b.$ref"),
    ({"type": "object", "properties": {"c": {"type": "array", "uniqueItems": True}}}, "schema.properties.c"),
    ({"type": "string", "pattern": "((a{200}){200}){200}"}, "schema.pattern"),
    ({"anyOf": []}, "schema.anyOf"),
    ("{", "schema"),
    (False, "schema"),
    (deep(100), "schema.properties.a.properties.a"),
    (deep(2000), ""),
]


@pytest.mark.parametrize(("schema", "place"), BAD)
async def test_a23_a_bad_schema_is_a_400_that_names_the_place_and_disturbs_nobody(
    http: httpx2.AsyncClient, schema: Any, place: str
) -> None:
    good = {**BODY, "temperature": 0, "max_tokens": 10}
    before = (await http.post("/v1/chat/completions", json=good)).json()["choices"]
    started = time.process_time()  # of the server and its client, whatever else the machine does
    depth = 2100 if not place else 0
    content = _dumps({**BODY, "response_format": response_format(schema)}, depth)
    headers = {"Content-Type": "application/json"}
    refused, beside = await asyncio.gather(
        http.post("/v1/chat/completions", content=content, headers=headers),
        http.post("/v1/chat/completions", json=good),
    )
    assert refused.status_code == 400, refused.text
    assert time.process_time() - started < 10
    assert place in refused.json()["error"]["message"]
    assert len(refused.content) < 3000
    assert beside.json()["choices"] == before


async def test_a23_a_bad_pattern_or_grammar_is_a_400_that_names_the_place(http: httpx2.AsyncClient) -> None:
    for outputs in ({"regex": "[a-"}, {"regex": "(a{1000}){1000}"}, {"grammar": "start: nothing"}, {"choice": []}):
        response = await http.post("/v1/chat/completions", json={**BODY, "structured_outputs": outputs})
        assert response.status_code == 400, response.text
        assert f"structured_outputs.{next(iter(outputs))}" in response.json()["error"]["message"]


async def test_what_a_grammar_cannot_go_with_is_refused(http: httpx2.AsyncClient) -> None:
    for extra in ({"ignore_eos": True}, {"min_tokens": 3}, {"structured_outputs": {"regex": "a"}}):
        body = {**BODY, "response_format": response_format(ROOM), **extra}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, response.text


def _dumps(body: dict[str, Any], levels: int) -> str:
    """JSON, also of what is nested too deeply for the encoder."""
    if not levels:
        return json.dumps(body)
    schema = '{"type":"object","properties":{"a":' * levels + "true" + "}}" * levels
    return json.dumps({**body, "response_format": response_format("HERE")}).replace('"HERE"', schema)
