"""Server-sent events: their order, usage, exactly one [DONE], failures, keep-alive, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from crosspool.core import FinishReason
from crosspool.errors import ModelRemovedError, QueueFullError, ShuttingDownError, WorkerLostError
from crosspool.server.guards import BodyLimit
from crosspool.server.stream import EventStream
from tests.support.awaited import soon
from tests.support.fake_engine import FakeEngine, Script
from tests.support.live_server import live_server
from tests.support.server_fixtures import events, fake_app

PROMPT = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
async def test_joined_pieces_equal_the_plain_answer(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> None:
    body = {**body, "n": 2}
    plain = (await http.post(path, json=body)).json()
    response = await http.post(path, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, done = events(response.text)
    assert done == "[DONE]"
    assert response.text.count("[DONE]") == 1
    for choice in plain["choices"]:
        mine = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == choice["index"]]
        if "chat" in path:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(piece["delta"].get("content") or "" for piece in mine)
            assert text == choice["message"]["content"] == "One two three four"
        else:
            assert "".join(piece["text"] for piece in mine) == choice["text"] == "One two three four"
        assert [piece["finish_reason"] for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert len({piece["id"] for piece in pieces}) == 1
    assert plain["usage"] == {
        "prompt_tokens": plain["usage"]["prompt_tokens"],
        "completion_tokens": 8,
        "total_tokens": plain["usage"]["prompt_tokens"] + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_several_prompts_give_choices_in_order(http: httpx2.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json={**PROMPT, "prompt": ["a", "bc", "def"], "n": 2})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"]["prompt_tokens"] == 1 + 2 + 3  # each prompt once, whatever n is
    assert answer["usage"]["completion_tokens"] == 6 * 4


async def test_logprobs_are_the_same_in_both_forms(http: httpx2.AsyncClient) -> None:
    chat = {**CHAT, "logprobs": True, "top_logprobs": 2}
    plain = (await http.post("/v1/chat/completions", json=chat)).json()["choices"][0]["logprobs"]["content"]
    *pieces, _ = events((await http.post("/v1/chat/completions", json={**chat, "stream": True})).text)
    joined = [item for piece in pieces for item in (piece["choices"][0]["logprobs"] or {}).get("content", [])]
    assert joined == plain
    assert len(plain) == 4
    assert [len(item["top_logprobs"]) for item in plain] == [2] * 4

    completion = {**PROMPT, "logprobs": 2}
    plain = (await http.post("/v1/completions", json=completion)).json()["choices"][0]["logprobs"]
    *pieces, _ = events((await http.post("/v1/completions", json={**completion, "stream": True})).text)
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for piece in pieces for item in piece["choices"][0]["logprobs"][key]] == plain[key]
        assert len(plain[key]) == 4


async def test_minus_infinity_becomes_the_floor(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    engine.scripts["tiny"] = Script(logprob=float("-inf"))
    answer = await http.post("/v1/completions", json={**PROMPT, "logprobs": 1})
    assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0] * 4
    assert "Infinity" not in answer.text


REFUSALS = [
    (QueueFullError("full", retry_after_s=3.2), 429, "queue_full"),
    (ShuttingDownError("closing"), 503, "shutting_down"),
    (ModelRemovedError("going"), 503, "model_removed"),
    (WorkerLostError("gone"), 503, "worker_lost"),
]


@pytest.mark.parametrize(("refusal", "status", "code"), REFUSALS)
async def test_a_refusal_is_a_plain_status_in_both_forms(
    http: httpx2.AsyncClient, engine: FakeEngine, refusal: Exception, status: int, code: str
) -> None:
    engine.scripts["tiny"] = Script(refusal=refusal)
    for stream in (False, True):
        response = await http.post("/v1/completions", json={**PROMPT, "stream": stream})
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert int(response.headers["retry-after"]) >= 1


async def test_when_one_prompt_is_refused_the_others_are_aborted(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    engine.max_queue = 2
    response = await http.post("/v1/completions", json={**PROMPT, "prompt": ["a", "b", "c"]})
    assert response.status_code == 429
    assert len(engine.aborted) == 2
    assert not engine.running


@pytest.mark.parametrize(("prompt", "n", "param"), [("a", 7, "n"), (["a", "b"], 4, "prompt")])
async def test_a_call_that_could_never_be_accepted_is_told_so_and_not_to_come_again(
    http: httpx2.AsyncClient, engine: FakeEngine, prompt: object, n: int, param: str
) -> None:
    engine.max_sequences = 6
    response = await http.post("/v1/completions", json={**PROMPT, "prompt": prompt, "n": n})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "too_many_choices", param)
    assert "takes at most 6 at a time" in error["message"]
    assert not engine.requests
    engine.max_sequences = 8
    assert (await http.post("/v1/completions", json={**PROMPT, "prompt": prompt, "n": n})).status_code == 200


async def test_a_failure_before_the_first_token_is_a_plain_status(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    engine.scripts["tiny"] = Script(fail_after=0, error=WorkerLostError("w0 is gone"))
    for stream in (False, True):
        response = await http.post("/v1/completions", json={**PROMPT, "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_lost")
    assert not engine.running


async def test_a20_a_failure_in_mid_stream_is_one_error_event_and_one_done(
    http: httpx2.AsyncClient, engine: FakeEngine
) -> None:
    engine.scripts["tiny"] = Script(fail_after=2)
    response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True, "n": 2})
    assert response.status_code == 200
    found = events(response.text)
    assert found[-1] == "[DONE]"
    assert found.count("[DONE]") == 1
    errors = [item for item in found[:-1] if "error" in item]
    assert found[-2] == errors[0]
    assert len(errors) == 1
    assert errors[0]["error"]["code"] == "engine_error"
    assert not engine.running


async def test_waiting_streams_get_comment_lines(
    http_with: Callable[..., httpx2.AsyncClient], engine: FakeEngine
) -> None:
    engine.scripts["tiny"] = Script(first_delay_s=0.12)
    async with http_with(sse_keep_alive_s=0.05) as http:
        response = await http.post("/v1/completions", json={**PROMPT, "stream": True})
        assert response.text.startswith(": ")
        assert 1 <= response.text.count("\n: ") + 1 <= 3
        assert len(events(response.text)) == 5
        engine.scripts["tiny"] = Script(first_delay_s=0.12, fail_after=0)
        late = events((await http.post("/v1/completions", json={**PROMPT, "stream": True})).text)
        assert [list(item) for item in late[:-1]] == [["error"]]
        assert late[-1] == "[DONE]"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_streams_that_wait_within_their_answer_get_comment_lines_too(
    http_with: Callable[..., httpx2.AsyncClient], engine: FakeEngine, path: str
) -> None:
    engine.scripts["tiny"] = Script(words=["One", " two"], delay_s=0.3)
    asked = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with http_with(sse_keep_alive_s=0.05) as http:
        response = await http.post(path, json={"model": "tiny", "max_tokens": 2, "stream": True, **asked})
    before, after = response.text.split("One")
    assert before.count(": waiting") >= 1
    assert after.count(": waiting") >= 1
    assert events(response.text)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(engine: FakeEngine, tmp_path: Path, stream: bool) -> None:
    """Over a real connection, 20 clients at once, in the first tokens and while nothing has come yet."""
    engine.scripts["tiny"] = Script(delay_s=0.02)
    engine.scripts["other"] = Script(first_delay_s=60)

    async def ask(client: httpx2.AsyncClient, model: str) -> None:
        body = {**PROMPT, "model": model, "max_tokens": 1000, "stream": stream}
        async with client.stream("POST", "/v1/completions", json=body, timeout=60) as response:
            async for _ in response.aiter_lines():
                return

    with live_server(fake_app(engine, tmp_path)) as url:
        async with httpx2.AsyncClient(base_url=url) as client:
            asked = [asyncio.create_task(ask(client, model)) for model in ["tiny", "other"] * 10]
            await soon(lambda: len(engine.requests) == 20)
            if stream:  # those that read a line leave by themselves
                await asyncio.gather(*asked[::2])
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await soon(lambda: not engine.running)
    assert len(engine.requests) == 20
    assert len(engine.aborted) == 20
    assert engine.finished["tiny"] == {str(FinishReason.ABORT): 10}


async def test_no_task_is_left_after_answers_failures_and_refusals(
    http: httpx2.AsyncClient, engine: FakeEngine
) -> None:
    before = asyncio.all_tasks()
    for script in (Script(), Script(fail_after=1), Script(refusal=ShuttingDownError("no"))):
        engine.scripts["tiny"] = script
        for stream in (False, True):
            await http.post("/v1/completions", json={**PROMPT, "stream": stream, "n": 2, "prompt": ["a", "b"]})
    assert asyncio.all_tasks() == before


async def test_events_are_closed_at_once_when_the_client_leaves() -> None:
    closed_at: list[str] = []
    left = asyncio.Event()

    async def told() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
        finally:
            closed_at.append("closed")

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("body"):
            left.set()
            await asyncio.Event().wait()  # it does not take what is sent

    source = told()  # held here, so that nothing but the response can close it
    async with asyncio.timeout(5):
        await EventStream(source)({"type": "http"}, receive, send)
    assert closed_at == ["closed"]


async def test_a_stream_whose_request_has_a_body_that_is_too_large_goes_on_until_the_client_leaves() -> None:
    """Nobody reads the body of a GET: what comes of it is no reason to break the answer off."""
    is_read, has_left = asyncio.Event(), asyncio.Event()
    pieces = iter([b"x" * 600] * 3)

    async def receive() -> dict[str, Any]:
        if (piece := next(pieces, None)) is not None:
            return {"type": "http.request", "body": piece, "more_body": True}
        is_read.set()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def ticks() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"tick"
            await asyncio.sleep(0.001)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await EventStream(ticks())(scope, receive, send)

    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/stats/stream", "headers": []}
    streaming = asyncio.create_task(BodyLimit(app, max_body_bytes=1000)(scope, receive, send))
    await asyncio.wait_for(is_read.wait(), 10)
    num_sent = len(sent)
    while len(sent) < num_sent + 3:
        assert not streaming.done()
        await asyncio.sleep(0.001)
    has_left.set()
    await asyncio.wait_for(streaming, 10)
