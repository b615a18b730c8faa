"""Prompts and messages: what is taken as it is, and what is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from crosspool.units import MiB
from tests.support.live_deployment import live_deployment
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_tokenizer import END_OF_TEXT
from tests.support.user_case_client import CONTEXT, complete, connect, deployment, refused


async def test_a02_over_long_prompts_are_refused_with_true_numbers(http: httpx2.AsyncClient) -> None:
    for num_prompt, max_tokens, field in ((9, 1020, "max_tokens"), (1025, 1, "prompt"), (1024, 1, "prompt")):
        error = await refused(http, prompt=[5] * num_prompt, max_tokens=max_tokens)
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        for number in (CONTEXT, num_prompt, max_tokens):
            assert str(number) in error["message"].replace(",", " ").replace(";", " ").split()
    exact = await complete(http, prompt=[5] * 1000, max_tokens=24, ignore_eos=True)
    assert exact["usage"]["total_tokens"] == CONTEXT
    default = await complete(http, prompt=[5] * 1000, ignore_eos=True)
    assert (default["usage"]["total_tokens"], default["choices"][0]["finish_reason"]) == (CONTEXT, "length")


async def test_a09_ordinary_message_shapes(http: httpx2.AsyncClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    user = {"role": "user", "content": "hi"}
    for turns in (
        [user, {"role": "assistant", "content": ""}, user],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "again"}]}],
        [user, user],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, user],
        [user, {"role": "assistant", "content": "42"}, {"role": "tool", "content": "42"}],
    ):
        for stream in (False, True):
            body = {"model": "P", "messages": turns, "max_tokens": 2, "stream": stream}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    # This model's template adds content to text, so a null one is refused in words, not with a 500.
    called = [user, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "42"}]
    assert "tool calls" in (await refused(http, "/v1/chat/completions", messages=called))["message"]  # not dropped
    nothing = [user, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "template" in (await refused(http, "/v1/chat/completions", messages=nothing))["message"]
    for turns in ([{"role": "wizard", "content": "hi"}], []):
        assert (await refused(http, "/v1/chat/completions", messages=turns))["param"] == "messages"


async def test_a28_one_begin_token(tmp_path: Path) -> None:
    """A model whose tokenizer adds the begin token and whose template writes it too."""
    path = write_tiny_model(tmp_path / "begins", "qwen3_moe", num_layers=2)
    raw = Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.post_processor = TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)])
    raw.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    config |= {"bos_token": END_OF_TEXT, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))

    async def count(path: str, **body: Any) -> int:
        response = await http.post(path, json={"model": "P", "max_tokens": 1, **body})
        assert response.status_code == 200, response.text
        tokens: int = response.json()["usage"]["prompt_tokens"]
        return tokens

    with live_deployment(deployment({"P": path})) as live:
        async with connect(live) as http:
            assert await count("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]) == 1 + 2 + 1
            rendered = f"{END_OF_TEXT}hi<|end|>"
            assert await count("/v1/completions", prompt=rendered) == 1 + 2 + 1
            assert await count("/v1/completions", prompt="hi") == 1 + 2
            assert await count("/v1/completions", prompt="hi", add_special_tokens=False) == 2
            marked = f"{END_OF_TEXT}<|end|>"  # plain text inside a message: one token for each of its characters
            turns = [{"role": "user", "content": marked}]
            assert await count("/v1/chat/completions", messages=turns) > 1 + len(marked) // 2


async def test_a34_empty_prompts(http: httpx2.AsyncClient, tmp_path: Path) -> None:
    for prompt in ("", [""], [], [[]], ["ok", ""]):  # P has no begin token: nothing to go on from
        assert (await refused(http, prompt=prompt, max_tokens=2))["param"] == "prompt"
    await complete(http, prompt=[0], max_tokens=2)
    chat = {"model": "P", "messages": [{"role": "user", "content": ""}], "max_tokens": 2}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    path = write_tiny_model(tmp_path / "begins", "qwen3_moe", num_layers=2)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|endoftext|>"}))
    with live_deployment(deployment({"P": path})) as live:
        async with connect(live) as with_begin:
            for prompt in ("", [""], [[]], ["ok", ""]):
                answer = await complete(with_begin, prompt=prompt, max_tokens=2, ignore_eos=True)
                assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
            answer = await complete(with_begin, prompt="", max_tokens=2)
            assert answer["usage"]["prompt_tokens"] == 1


async def test_a35_null_is_left_out(http: httpx2.AsyncClient) -> None:
    names = "temperature top_p max_tokens stop seed stream logit_bias stream_options"
    limits = {"model": "P", "prompt": "hello there", "seed": 4, "max_tokens": 50, "ignore_eos": True}
    nulls = {name: None for name in names.split() if name not in limits}
    plain = await http.post("/v1/completions", json=limits)
    with_nulls = await http.post("/v1/completions", json={**limits, **nulls})
    assert plain.status_code == with_nulls.status_code == 200
    assert plain.json()["choices"] == with_nulls.json()["choices"]
    everything = {"model": "P", "prompt": "hello", **dict.fromkeys(names.split())}
    assert (await http.post("/v1/completions", json=everything)).status_code == 200


async def test_a37_half_an_emoji(http: httpx2.AsyncClient) -> None:
    chat = '{"model": "P", "max_tokens": 2, "messages": [{"role": "user", "content": %s}]%s}'
    completion = '{"model": "P", "max_tokens": 2, "prompt": %s%s}'
    stop = '{"model": "P", "max_tokens": 2, "prompt": "a", "stop": %s%s}'
    tool = '{"model": "P", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "tools": [%s]%s}'

    async def send(form: str, value: str, stream: bool) -> httpx2.Response:
        path = "/v1/chat/completions" if "messages" in form else "/v1/completions"
        content = form % (value, ', "stream": true' if stream else "")
        return await http.post(path, content=content.encode(), headers={"Content-Type": "application/json"})

    for stream in (False, True):
        for form in (chat, completion, stop, tool):
            for value in ('"cut \\ud83e"', '"\\udd55 x"'):
                response = await send(form, value, stream)
                assert response.status_code == 400, response.text
                assert response.json()["error"]["param"] in ("messages", "prompt", "stop", "tools")
                assert "Error" not in response.text
        for form in (chat, completion):
            for value in ('"\\ud83e\\udd55"', '"\\u0000"', '"\\ufeffhi"'):
                assert (await send(form, value, stream)).status_code == 200
    body = b'{"model": "P", "prompt": "\xff\xfe"}'
    assert (await http.post("/v1/completions", content=body)).status_code == 400
    assert (await refused(http, prompt="a" * MiB))["code"] == "context_length_exceeded"


async def test_a44_an_unknown_name_is_never_answered_by_another_model(http: httpx2.AsyncClient) -> None:
    chat, completion = {"messages": [{"role": "user", "content": "x"}]}, {"prompt": "x"}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
        for stream in (False, True):
            for name in ("nope", "", "p", "/models/P", "P ", "x" * 5000):
                response = await http.post(path, json={**body, "model": name, "stream": stream})
                error = response.json()["error"]
                assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
                assert "P, Q" in error["message"]
                assert len(response.content) < 1000
            for absent in (body, {**body, "model": None}):
                response = await http.post(path, json={**absent, "stream": stream})
                assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
        answer = await http.post(path, json={**body, "model": "nickname", "max_tokens": 2})
        assert (answer.status_code, answer.json()["model"]) == (200, "P")
