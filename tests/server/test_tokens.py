"""/tokenize, /detokenize, the 501 of /v1/embeddings, and deadlines."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from crosspool.errors import DeadlineExceededError
from tests.support.fake_engine import FakeEngine


async def test_text_to_ids_and_back(http: httpx2.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "the <|end|> é🧑", "return_token_strs": True}
    answer = (await http.post("/tokenize", json=body)).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    back = await http.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": "the <|end|> é🧑"}


async def test_a_conversation_has_the_ids_of_its_prompt(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    tokens = (await http.post("/tokenize", json={"model": "tiny", "messages": messages})).json()["tokens"]
    await http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 1})
    assert tuple(tokens) == engine.requests[0].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_wrong_bodies_are_400(http: httpx2.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await http.post(path, json={"model": "tiny", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0] == param
    assert (await http.post(path, json={**body, "model": "nobody"})).status_code in (400, 404)


async def test_embeddings_are_a_clear_501(http: httpx2.AsyncClient) -> None:
    response = await http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})
    assert response.status_code == 501
    assert response.json()["error"]["code"] == "not_offered"
    assert response.headers["x-should-retry"] == "false"  # OpenAI's clients would ask three times


async def test_a_deadline_reaches_the_engine_from_body_or_header(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    header = {"X-Request-Timeout": "2.5"}
    await http.post("/v1/completions", json=body)
    await http.post("/v1/completions", json=body, headers=header)
    await http.post("/v1/completions", json={**body, "timeout": 7}, headers=header)
    assert [request.timeout_s for request in engine.requests] == [None, 2.5, 7.0]
    for wrong in ("0", "-1", "soon", "nan", "1e9"):
        response = await http.post("/v1/completions", json=body, headers={"X-Request-Timeout": wrong})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Timeout")
    engine.scripts["tiny"].fail_after = 0
    engine.scripts["tiny"].error = DeadlineExceededError("it waited 2.5 s in the queue of tiny, past its deadline")
    assert (await http.post("/v1/completions", json={**body, "timeout": 2.5})).status_code == 408
