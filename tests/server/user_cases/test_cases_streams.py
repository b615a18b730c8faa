"""How answers end and how they stream: stops, end tokens, usage, clients that leave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2
import pytest

from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.server_fixtures import events
from tests.support.tiny_models import write_tiny_model
from tests.support.user_case_client import complete, connect, deployment, refused, streamed, text_of, until_idle

EMOJI_LINE = "Repeat this line only: žluťoučký 🧑🏽‍🚀🇺🇳 မြို့ 𠮷野家 ﷽ \u200d"


@pytest.mark.parametrize("stream", [True, False])
async def test_a03_clients_that_leave_free_their_pages(
    http: httpx2.AsyncClient, live: LiveDeployment, stream: bool
) -> None:
    def aborts() -> int:
        return sum(load.num_finished.get("abort", 0) for load in live.stats().models)

    def accepted() -> int:
        return sum(load.num_accepted for load in live.stats().models)

    async def leave(client: httpx2.AsyncClient, model: str) -> None:
        body = {"model": model, "prompt": "List the rivers:", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                return

    before, wanted = aborts(), accepted() + 50
    async with connect(live) as leaving:
        asked = [asyncio.create_task(leave(leaving, model)) for model in ["P", "Q"] * 25]
        while accepted() < wanted:  # a client of a plain answer leaves while it is made
            await asyncio.sleep(0.01)
        for task in asked if not stream else ():
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    await until_idle(live)
    assert aborts() - before == 50


async def test_a05_streams_and_plain_answers_have_the_same_characters(http: httpx2.AsyncClient) -> None:
    for seed in range(6):
        for cut in (7, 24):  # cuts within characters too
            body = {"prompt": EMOJI_LINE, "max_tokens": cut, "temperature": 1, "seed": seed}
            plain = await text_of(http, **body)
            joined, pieces = await streamed(http, **body)
            assert joined == plain
            assert [piece for piece in pieces if piece["choices"][0]["text"] == "\ufffd"] == [] or "\ufffd" in plain


async def test_a08_stop_strings_inside_and_across_tokens(
    http: httpx2.AsyncClient, directories: dict[str, Path]
) -> None:
    vocabulary = json.loads((directories["P"] / "tokenizer.json").read_text())["model"]["vocab"]
    letters = {str(token_id): 60 for token, token_id in vocabulary.items() if token.strip("Ġ").isascii()}
    letters = {token_id: bias for token_id, bias in letters.items() if int(token_id) >= 5}
    body = {"prompt": "Months in order: January", "max_tokens": 40, "ignore_eos": True, "seed": 5, "temperature": 1.9}
    body["logit_bias"] = letters
    whole = await text_of(http, **body)
    answer = await complete(http, **body, logprobs=0)
    tokens = answer["choices"][0]["logprobs"]["tokens"]
    assert "\ufffd" not in whole
    assert max(map(len, tokens)) > 1  # some stops below begin or end inside a token
    for start, length in ((3, 1), (5, 4), (6, 2), (7, 3), (9, 7), (20, 5)):
        stop = whole[start : start + length]
        expected = whole[: whole.index(stop)]
        plain = await complete(http, **body, stop=["zzz", stop])
        joined, pieces = await streamed(http, **body, stop=["zzz", stop])
        assert plain["choices"][0]["text"] == joined == expected
        assert plain["choices"][0]["finish_reason"] == pieces[-1]["choices"][0]["finish_reason"] == "stop"
        kept = await text_of(http, **body, stop=[stop], include_stop_str_in_output=True)
        assert kept == expected + stop
    first, second = whole[4:7], whole[8:11]
    earliest = min(whole.index(first), whole.index(second))
    assert await text_of(http, **body, stop=[second, first]) == whole[:earliest]


async def test_a11_every_end_token_ends(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "ends", "qwen3_moe", num_layers=2, eos_token_id=7)
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    own_end = next(token for token, token_id in vocabulary.items() if token_id == 11)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": own_end}))
    for generation, ends in (
        ({"eos_token_id": [7, 9]}, (7, 9, 11)),
        ({"eos_token_id": 9}, (7, 9, 11)),
        (None, (7, 11)),
    ):
        (path / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (path / "generation_config.json").write_text(json.dumps(generation))
        with live_deployment(deployment({"P": path})) as live:
            async with connect(live) as http:
                for end in ends:
                    body = {"prompt": "hi", "min_tokens": 5, "max_tokens": 30, "logit_bias": {str(end): 100}}
                    answer = await complete(http, **body, skip_special_tokens=False)
                    assert answer["choices"][0]["finish_reason"] == "stop"
                    assert answer["choices"][0]["stop_reason"] == end
                    assert answer["usage"]["completion_tokens"] == 6
                    mark = next(token for token, token_id in vocabulary.items() if token_id == end)
                    assert mark not in answer["choices"][0]["text"]


async def test_a19_usage_in_streams(http: httpx2.AsyncClient) -> None:
    chat = {"model": "P", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    plain = (await http.post("/v1/chat/completions", json=chat)).json()
    for options in (None, {"include_usage": False}, {}):
        body = {**chat, "stream": True} | ({} if options is None else {"stream_options": options})
        assert '"usage"' not in (await http.post("/v1/chat/completions", json=body)).text
    counting = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last, done = events((await http.post("/v1/chat/completions", json={**chat, **counting})).text)
    assert done == "[DONE]"
    assert all(piece["usage"] is None for piece in pieces)
    assert (last["choices"], last["usage"]) == ([], plain["usage"])
    stop = plain["choices"][0]["message"]["content"][2:4]
    cut = {**chat, "stop": [stop]}
    counted = (await http.post("/v1/chat/completions", json=cut)).json()["usage"]
    *_, last, _ = events((await http.post("/v1/chat/completions", json={**cut, **counting})).text)
    assert last["usage"] == counted
    assert counted["completion_tokens"] < 12
    error = (await http.post("/v1/chat/completions", json={**chat, "stream_options": {"include_usage": True}})).json()
    assert error["error"]["param"] == "stream_options"


async def test_a20_bad_streams_are_refused_before_they_start(http: httpx2.AsyncClient) -> None:
    for n in (0, -2):
        response = await http.post("/v1/completions", json={"model": "P", "prompt": "a", "n": n, "stream": True})
        assert response.status_code == 400
        assert "[DONE]" not in response.text


async def test_a36_stop_lists(http: httpx2.AsyncClient) -> None:
    for stop in ("", [""], ["", "END"], [1], ["x"] * 2000, "x" * 100_000):
        error = await refused(http, prompt="hi", stop=stop)
        assert error["param"] == "stop"
    assert "16" in (await refused(http, prompt="hi", stop=["x"] * 17))["message"]
    assert "1000" in (await refused(http, prompt="hi", stop="x" * 1001))["message"]
    body = {"prompt": "hi", "max_tokens": 8}
    assert await text_of(http, **body, stop=[]) == await text_of(http, **body)
