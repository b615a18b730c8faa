"""What hurts people who serve several models, as requests to a whole server: real engine, real workers, real HTTP.

P and Q are tiny random models on one pair of pools. After every bad input a good request to each must still be right.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from crosspool.config import DeploymentConfig, ModelConfig, PoolsConfig, SchedulingConfig
from crosspool.units import KiB, MiB
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.server_fixtures import events
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_tokenizer import END_OF_TEXT

CONTEXT = 1024
GOOD = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10, "temperature": 0}
EMOJI_LINE = "Repeat this line only: žluťoučký 🧑🏽‍🚀🇺🇳 မြို့ 𠮷野家 ﷽ \u200d"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "P": write_tiny_model(root / "P", "qwen3_moe", num_layers=2, max_position_embeddings=CONTEXT),
        "Q": write_tiny_model(root / "Q", "deepseek_v2", num_layers=2, max_position_embeddings=CONTEXT),
    }


def deployment(directories: dict[str, Path], kv_pool_bytes: int = 32 * MiB, **scheduling: Any) -> DeploymentConfig:
    return DeploymentConfig(
        models=tuple(
            ModelConfig(source=str(path), name=name, page_tokens=16, aliases=("nickname",) if name == "P" else ())
            for name, path in directories.items()
        ),
        pools=PoolsConfig(layout="inprocess", kv_pool_bytes=kv_pool_bytes, frame_bytes=64 * KiB),
        scheduling=SchedulingConfig(**scheduling),
    )


@pytest.fixture(scope="module")
def live(directories: dict[str, Path]) -> Iterator[LiveDeployment]:
    with live_deployment(deployment(directories)) as found:
        yield found


@pytest.fixture
async def http(live: LiveDeployment) -> AsyncIterator[httpx2.AsyncClient]:
    """A client; what good requests answer is checked again when the test is over, and nothing may be left running."""
    async with connect(live) as client:
        before = await good_answers(client)
        yield client
        await until_idle(live)
        assert await good_answers(client) == before


def connect(live: LiveDeployment) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(base_url=live.url, timeout=60, limits=limits)


async def good_answers(http: httpx2.AsyncClient) -> list[str]:
    answers = [await http.post("/v1/chat/completions", json={**GOOD, "model": name}) for name in ("P", "Q")]
    assert [answer.status_code for answer in answers] == [200, 200]
    return [answer.json()["choices"][0]["message"]["content"] for answer in answers]


async def until_idle(live: LiveDeployment, seconds: float = 2.0) -> None:
    """Nothing queued or running, and every page back."""
    deadline = time.monotonic() + seconds
    while True:
        stats = live.stats()
        busy = sum(load.num_queued + load.num_prefilling + load.num_decoding + load.num_parked for load in stats.models)
        held = sum(pool.frames_used + pool.frames_reserved for pool in stats.pools)
        if busy == held == 0:
            return
        assert time.monotonic() < deadline, f"{busy} sequences and {held} frames are left after {seconds} s"
        await asyncio.sleep(0.01)


async def complete(http: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    """One successful completion, greedy unless told otherwise."""
    response = await http.post("/v1/completions", json={"model": "P", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def text_of(http: httpx2.AsyncClient, **body: Any) -> str:
    text: str = (await complete(http, **body))["choices"][0]["text"]
    return text


async def streamed(http: httpx2.AsyncClient, **body: Any) -> tuple[str, list[Any]]:
    """Joined text of a streamed completion, and its events without [DONE]."""
    response = await http.post("/v1/completions", json={"model": "P", "temperature": 0, "stream": True, **body})
    assert response.status_code == 200, response.text
    *pieces, done = events(response.text)
    assert done == "[DONE]"
    assert response.text.count("[DONE]") == 1
    return "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]), pieces


async def refused(http: httpx2.AsyncClient, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """The error of a request that must be a 400, streamed or not."""
    found = {}
    for stream in (False, True):
        response = await http.post(path, json={"model": "P", **body, "stream": stream})
        assert response.status_code == 400, response.text
        found = response.json()["error"]
    return found


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


async def test_a06_what_can_never_fit_the_pool_is_refused_at_once(directories: dict[str, Path]) -> None:
    one_page = 2 * 64 * KiB  # P has two layers' parts in one frame; a few pages hold a few hundred tokens
    with live_deployment(deployment(directories, kv_pool_bytes=13 * one_page)) as live:
        async with connect(live) as http:
            limit = live.engine.model("P").context_limit
            assert limit < CONTEXT  # the published limit is one that a request can use
            large = asyncio.create_task(http.post("/v1/completions", json={"model": "P", "prompt": [5] * 900}))
            small = await complete(http, prompt=[5] * 10, max_tokens=8)
            response = await large
            assert small["usage"]["prompt_tokens"] == 10
            assert response.status_code == 400
            assert "900" in response.json()["error"]["message"]
            assert str(limit) in response.json()["error"]["message"]
            grows = await http.post(
                "/v1/completions", json={"model": "P", "prompt": [5] * (limit - 50), "max_tokens": 300}
            )
            assert grows.status_code == 400
            whole = await complete(http, prompt=[5] * (limit - 50), ignore_eos=True)
            assert whole["usage"]["total_tokens"] == limit
            await until_idle(live)


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


async def test_a10_odd_sampling_fields_hurt_nobody(http: httpx2.AsyncClient) -> None:
    long = {"prompt": "Once upon", "max_tokens": 200, "ignore_eos": True, "temperature": 1, "seed": 3}
    alone = [await text_of(http, **long, model=name) for name in ("P", "Q")]
    running = [asyncio.create_task(text_of(http, **long, model=name)) for name in ("P", "Q")]
    for odd, field in (
        ({"logit_bias": {"99999999": -3}}, "logit_bias"),
        ({"logit_bias": {"dog": 2}}, "logit_bias"),
        ({"seed": 36893488147419103232}, "seed"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": -0.1}, "temperature"),
        ({"echo": True, "logprobs": 1, "max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 5000}, "logprobs"),
    ):
        assert (await refused(http, prompt="hi", **odd))["param"] == field
    nan = b'{"model": "P", "prompt": "hi", "temperature": NaN}'
    response = await http.post("/v1/completions", content=nan, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")
    for taken in ({"seed": -1}, {"top_k": 8589934592}, {"top_k": 513, "temperature": 1}):
        await complete(http, prompt="hi", max_tokens=4, **taken)
    assert [await task for task in running] == alone


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


async def test_a12_logprobs_are_always_json(http: httpx2.AsyncClient) -> None:
    for extra in ({"temperature": 0.01, "top_p": 0.2}, {"top_k": 1, "temperature": 1, "seed": 1}):
        body = {"prompt": "hello", "max_tokens": 20, "logprobs": 5, "ignore_eos": True, **extra}
        top = (await complete(http, **body))["choices"][0]["logprobs"]
        _, pieces = await streamed(http, **body)
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert len(top[key]) == 20
            assert [item for piece in pieces for item in piece["choices"][0]["logprobs"][key]] == top[key]
        assert all(-9999 <= logprob <= 0 for logprob in top["token_logprobs"])
    chat = {"model": "P", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "ignore_eos": True}
    chat |= {"logprobs": True, "top_logprobs": 20, "logit_bias": {"40": -100}, "temperature": 0}
    answer = (await http.post("/v1/chat/completions", json=chat)).json()["choices"][0]["logprobs"]["content"]
    assert len(answer) == 10
    for item in answer:
        assert len(item["top_logprobs"]) == 20
        assert item["logprob"] <= item["top_logprobs"][0]["logprob"] <= 0


async def test_a18_the_waiting_line_has_an_end(directories: dict[str, Path]) -> None:
    with live_deployment(deployment(directories, max_queue=8, max_num_seqs=4)) as live:
        body = {"prompt": [5] * 8, "max_tokens": 30, "ignore_eos": True, "temperature": 0}

        async def timed(model: str) -> tuple[httpx2.Response, float]:
            started = time.monotonic()
            response = await http.post("/v1/completions", json={**body, "model": model})
            return response, time.monotonic() - started

        async with connect(live) as http:
            crowd = [asyncio.create_task(timed("P")) for _ in range(120)]
            others = [asyncio.create_task(timed("Q")) for _ in range(5)]
            answers = [(await task)[0] for task in crowd]
            assert [(await task)[0].status_code for task in others] == [200] * 5
            accepted = [answer for answer in answers if answer.status_code == 200]
            rejected = [answer for answer in answers if answer.status_code == 429]
            assert len(accepted) + len(rejected) == 120
            assert len(accepted) >= 8
            assert rejected
            assert all(answer.json()["usage"]["completion_tokens"] == 30 for answer in accepted)
            for answer in rejected:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "queue_full"
            blocked = [asyncio.create_task(timed("P")) for _ in range(12)]
            await asyncio.sleep(0.02)
            _, seconds = await timed("P")
            assert seconds < 0.1 or not any(load.num_queued for load in live.stats().models)
            await asyncio.gather(*blocked)
            await until_idle(live)


async def test_a18_a_request_past_its_deadline_costs_no_prefill(directories: dict[str, Path]) -> None:
    with live_deployment(deployment(directories, max_num_seqs=1, queue_timeout_s=0.2)) as live:
        async with connect(live) as http:
            long = {"prompt": [5] * 8, "max_tokens": 900, "ignore_eos": True}
            running = asyncio.create_task(complete(http, **long))
            await asyncio.sleep(0.05)
            late = await http.post("/v1/completions", json={"model": "P", "prompt": [6] * 333, "max_tokens": 2})
            assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
            assert not running.done()
            assert live.stats().models[0].prompt_tokens < 333
            await running


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


async def test_a31_a_short_pool_makes_requests_wait_and_all_of_them_end(directories: dict[str, Path]) -> None:
    config = deployment(directories, kv_pool_bytes=40 * 64 * KiB, max_queue=100)
    with live_deployment(config) as live:
        budget = live.stats().pools[0].frames_budget

        async def watch() -> None:
            while True:
                stats = live.stats()
                (pool,) = stats.pools
                parts = (pool.frames_used, pool.frames_reserved, pool.frames_reusable, pool.frames_free)
                assert sum(parts) == budget
                held = sum(load.frames_used + load.frames_reserved for load in stats.models)
                assert held == pool.frames_used + pool.frames_reserved
                await asyncio.sleep(0.005)

        async with connect(live) as http:
            watching = asyncio.create_task(watch())
            answers = await asyncio.gather(
                *(
                    complete(http, model=name, prompt=[5 + idx] * (30 + 2 * idx), max_tokens=20, ignore_eos=True)
                    for idx in range(30)
                    for name in ("P", "Q")
                )
            )
            assert not watching.done(), watching.result()
            watching.cancel()
            assert [answer["usage"]["completion_tokens"] for answer in answers] == [20] * 60
            await until_idle(live)


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


async def test_a36_stop_lists(http: httpx2.AsyncClient) -> None:
    for stop in ("", [""], ["", "END"], [1], ["x"] * 2000, "x" * 100_000):
        error = await refused(http, prompt="hi", stop=stop)
        assert error["param"] == "stop"
    assert "16" in (await refused(http, prompt="hi", stop=["x"] * 17))["message"]
    assert "1000" in (await refused(http, prompt="hi", stop="x" * 1001))["message"]
    body = {"prompt": "hi", "max_tokens": 8}
    assert await text_of(http, **body, stop=[]) == await text_of(http, **body)


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


async def test_a38_very_small_temperature_and_top_p_are_greedy(http: httpx2.AsyncClient) -> None:
    body = {"prompt": "hello", "max_tokens": 12, "seed": 9, "ignore_eos": True}
    greedy = await text_of(http, **body, temperature=0)
    assert greedy
    for cold in (
        {"temperature": 1e-4},
        {"temperature": 1e-7},
        {"temperature": 1e-30},
        {"temperature": 1, "top_p": 1e-6},
        {"temperature": 1, "min_p": 1},
        {"temperature": 1e-30, "top_p": 1e-6},
        {"temperature": 1, "top_k": 1, "logit_bias": {"300": -100}},
    ):
        assert await text_of(http, **body, **cold) == greedy, cold


async def test_a39_a_seed_gives_the_same_answer_in_any_company(http: httpx2.AsyncClient) -> None:
    body = {"prompt": "hello", "max_tokens": 24, "temperature": 0.9, "seed": 1234, "ignore_eos": True}
    alone = await text_of(http, **body)
    beside = await asyncio.gather(
        text_of(http, **body),
        text_of(http, **{**body, "seed": 77}),
        *(text_of(http, prompt="hello", max_tokens=24, temperature=0.9, ignore_eos=True) for _ in range(4)),
    )
    assert beside[0] == alone
    assert alone not in beside[1:]
    assert len(set(beside)) == 6  # without a seed: different texts
    several = [[choice["text"] for choice in (await complete(http, **body, n=3))["choices"]] for _ in range(2)]
    assert several[0] == several[1]
    assert len(set(several[0])) == 3
    assert several[0][0] == alone


async def test_a40_penalties_count_the_right_tokens(http: httpx2.AsyncClient) -> None:
    body = {"prompt": "plum plum plum plum plum", "max_tokens": 16, "ignore_eos": True}
    free = await text_of(http, **body)
    penalties = ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.5})
    alone = [await text_of(http, **body, **penalty) for penalty in penalties]
    company = await asyncio.gather(
        *(text_of(http, **body, **penalty) for penalty in penalties),
        text_of(http, **body),
        text_of(http, prompt="another length altogether", max_tokens=30, ignore_eos=True),
    )
    assert list(company[:3]) == alone
    assert company[3] == free
    for penalised in alone[:2]:  # nothing has been generated yet, so the first token is free of them
        assert penalised[:1] == free[:1]
    repeating = {**body, "logit_bias": {"40": 8}}  # pushes one token; the penalties must push back
    often = (await text_of(http, **repeating)).count("D")
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 5}):
        assert (await text_of(http, **repeating, **penalty)).count("D") <= often


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


async def test_a47_ids_that_the_tokenizer_has_not(http: httpx2.AsyncClient) -> None:
    last = 511  # P's output layer is wider than its tokenizer
    for extra in ({}, {"logprobs": 3}):
        answer = await complete(http, prompt="hi", max_tokens=5, logit_bias={str(last): 100}, **extra)
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 5)
    await complete(http, prompt=[5, last], max_tokens=2)
    for wrong in ([512], [-1], [5, 512]):
        assert (await refused(http, prompt=wrong))["param"] == "prompt"
