"""Every bound of the request bodies: a wrong value is a 400 that names the field; null is absent."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx2
import pytest

from tests.support.fake_engine import FakeEngine

OK = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
CHAT_OK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

WRONG_IN_BOTH: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 11),
    ("seed", 2**65),
    ("seed", 1.5),
    ("n", 0),
    ("n", -2),
    ("n", 129),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 3),
    ("logit_bias", {"dog": 2}),
    ("logit_bias", {"-1": 2}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", {"99999999": -3}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", [1]),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["", "END"]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("stop", "x" * 1001),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [512]),
    ("stop_token_ids", [1] * 257),
    ("ignore_eos", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("stream_options", 3),
    ("priority", 10_000),
    ("model", 7),
    ("logprobs", 5000),
    ("user", 3),
    ("guided_json", {"type": "object"}),
    ("regex", "a+"),
    ("allowed_token_ids", [5]),
    ("bad_words", ["no"]),
    ("return_token_ids", True),
    ("structured_outputs", {"regex": "[a-"}),
    ("structured_outputs", {"structural_tag": {}}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "xml"}),
    ("prompt_logprobs", 1),
    ("use_beam_search", True),
]
WRONG_COMPLETION: list[tuple[str, Any]] = [
    ("prompt", []),
    ("prompt", 5),
    ("prompt", [1, "a"]),
    ("prompt", [[1], "a"]),
    ("prompt", [[1.5]]),
    ("prompt", [-1]),
    ("prompt", [512]),
    ("prompt", ["a"] * 257),
    ("prompt", {"text": "a"}),
    ("echo", True),
    ("suffix", "end"),
    ("best_of", 3),
]
WRONG_CHAT: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", ["hi"]),
    ("messages", [{"role": "wizard", "content": "hi"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
    ("top_logprobs", 21),
    ("top_logprobs", 2),  # without logprobs: true
    ("max_completion_tokens", 0),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("chat_template", "{{ messages }}"),
    ("echo", True),
    ("modalities", ["audio"]),
    ("chat_template_kwargs", "x"),
]


@pytest.mark.parametrize(
    ("path", "body", "field", "value"),
    [("/v1/completions", OK, *case) for case in WRONG_IN_BOTH + WRONG_COMPLETION]
    + [("/v1/chat/completions", CHAT_OK, *case) for case in WRONG_IN_BOTH + WRONG_CHAT],
)
async def test_a_wrong_value_is_a_400_that_names_the_field(
    http: httpx2.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], field: str, value: Any
) -> None:
    for stream in (False, True):
        sent = {**body, "stream": stream, field: value}
        if field == "stream_options" and stream:
            sent["stream_options"] = "x"
        response = await http.post(path, json=sent)
        error = response.json()["error"]
        assert response.status_code == 400, response.text
        assert error["param"].split(".")[0] == field
        assert field in error["message"] or field == "logit_bias"
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["code"], str)
        assert len(response.content) < 3000
    assert engine.requests == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_not_finite_are_refused(http: httpx2.AsyncClient, number: str) -> None:
    content = f'{{"model": "tiny", "prompt": "hi", "temperature": {number}}}'
    response = await http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


async def test_null_is_absent(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    fields = "temperature top_p max_tokens stop seed stream logit_bias stream_options n logprobs top_logprobs user"
    for path, body in (("/v1/completions", OK), ("/v1/chat/completions", CHAT_OK)):
        with_nulls = await http.post(path, json={**body, **dict.fromkeys(fields.split())})
        without = {key: value for key, value in body.items() if key != "max_tokens"}
        plain = await http.post(path, json=without)
        assert with_nulls.status_code == plain.status_code == 200
        first, second = engine.requests[-2:]
        assert first.sampling == second.sampling
        assert first.sampling.max_tokens == 1024 - len(first.prompt_token_ids)


async def test_unknown_fields_are_accepted_and_logged(
    http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    response = await http.post("/v1/completions", json={**OK, "frobnicate": [1], "wibble": None})
    assert response.status_code == 200
    assert "frobnicate" in caplog.text
    assert "wibble" not in caplog.text  # null is absent


async def test_bookkeeping_of_hosted_services_is_taken_without_a_word(
    http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "k"}
    assert (await http.post("/v1/chat/completions", json={**CHAT_OK, **told})).status_code == 200
    assert "ignored" not in caplog.text


async def test_a_refused_field_names_what_to_send_instead(http: httpx2.AsyncClient) -> None:
    for field, remedy in (("guided_regex", "structured_outputs"), ("functions", "tools"), ("echo", "leave it out")):
        error = (await http.post("/v1/chat/completions", json={**CHAT_OK, field: "x"})).json()["error"]
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        assert remedy in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value", "remedy"),
    [
        ("/v1/chat/completions", "max_output_tokens", 9, "send max_tokens"),
        ("/v1/chat/completions", "stop_sequences", ["a"], "send stop"),
        ("/v1/chat/completions", "instructions", "Be brief.", "send a message of role system"),
        ("/v1/completions", "max_completion_tokens", 9, "send max_tokens"),
        ("/v1/completions", "tools", [{}], "/v1/chat/completions takes it"),
    ],
)
async def test_a_field_of_another_route_is_refused_with_its_name_here(
    http: httpx2.AsyncClient, path: str, field: str, value: Any, remedy: str
) -> None:
    ok = CHAT_OK if "chat" in path else OK
    error = (await http.post(path, json={**ok, field: value})).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert error["message"].startswith(f"{field} is not taken here; {remedy}")


async def test_one_limit_under_two_names_is_taken(http: httpx2.AsyncClient) -> None:
    """As load generators send it, which ask every route the same."""
    both = {**OK, "max_tokens": 9, "max_completion_tokens": 9}
    assert (await http.post("/v1/completions", json=both)).status_code == 200


async def test_a_broken_body_says_where_and_a_packed_one_how_to_send_it(http: httpx2.AsyncClient) -> None:
    headers = {"Content-Type": "application/json"}
    broken = await http.post("/v1/completions", content=b'{"model": "tiny",}', headers=headers)
    assert broken.json()["error"]["code"] == "invalid_json"
    assert "(character 17)" in broken.json()["error"]["message"]
    packed = gzip.compress(json.dumps(OK).encode())
    response = await http.post("/v1/completions", content=packed, headers={**headers, "Content-Encoding": "gzip"})
    assert response.status_code == 400
    assert "Content-Encoding gzip" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"prompt": "\xff"}',
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
)
async def test_a_broken_body_is_a_400(http: httpx2.AsyncClient, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = await http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
        assert len(response.content) < 3000


async def test_many_wrong_values_give_a_short_answer(http: httpx2.AsyncClient) -> None:
    body = {**CHAT_OK, "stop_token_ids": ["x" * 10_000] * 200, "temperature": "y" * 100_000}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert len(response.content) < 4000


async def test_every_field_reaches_the_engine(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "model": "nickname",
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 2**33,
        "min_p": 0.125,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": 3, "5": -100},
        "seed": 11,
        "n": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "ignore_eos": True,
        "priority": -3,
        "logprobs": 4,
    }
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    request = engine.requests[0]
    sampling = request.sampling
    assert (request.model, request.prompt_token_ids, request.n, request.seed) == ("tiny", (5, 6, 7), 3, 11)
    assert (request.stop, request.include_stop_str_in_output, request.skip_special_tokens) == (("a", "b"), True, False)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (9, 2, 0.25)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 512, 0.125)  # a huge top_k is clamped
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert sampling.logit_bias == ((5, -100.0), (7, 3.0))
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs) == ((9,), True, 4)
    assert request.priority == -3


@pytest.mark.parametrize(("given", "taken"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (-(2**63), 0)])
async def test_seeds_cover_int64_and_negative_ones_wrap(
    http: httpx2.AsyncClient, engine: FakeEngine, given: int, taken: int
) -> None:
    assert (await http.post("/v1/completions", json={**OK, "seed": given})).status_code == 200
    assert engine.requests[0].seed == taken


async def test_max_completion_tokens_wins_over_max_tokens(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    await http.post("/v1/chat/completions", json={**CHAT_OK, "max_completion_tokens": 5})
    assert engine.requests[0].sampling.max_tokens == 5


async def test_harmless_values_of_fields_not_offered_are_taken(http: httpx2.AsyncClient) -> None:
    chat = {**CHAT_OK, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "functions": []}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    completion = {**OK, "echo": False, "suffix": "", "best_of": 1, "use_beam_search": False}
    assert (await http.post("/v1/completions", json=completion)).status_code == 200


async def test_generation_defaults_of_the_model_fill_gaps(engine: FakeEngine, tmp_path: Any) -> None:
    from crosspool.server.app import create_app
    from crosspool.server.catalogue import Catalogue, SamplingDefaults
    from tests.support.server_fixtures import connect, tiny_frontend

    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    app = create_app(engine, Catalogue([tiny_frontend(tmp_path / "tiny", defaults=defaults)]))
    async with connect(app) as http:
        await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "temperature": 0, "top_k": 0})
    first, second = (request.sampling for request in engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (0.6, 0.95, 20, 1.1)
    assert (second.temperature, second.top_p, second.top_k) == (0.0, 0.95, 0)


def test_the_schema_names_every_field_with_its_bounds() -> None:
    from crosspool.server.protocol import ChatBody

    schema = json.dumps(ChatBody.model_json_schema())
    for field in ("messages", "top_logprobs", "logit_bias", "chat_template_kwargs"):
        assert f'"{field}"' in schema
