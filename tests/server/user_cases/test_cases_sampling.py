"""Sampling fields: odd ones hurt nobody, and those that are taken do what they say in any company."""

from __future__ import annotations

import asyncio

import httpx2

from tests.support.user_case_client import complete, refused, streamed, text_of


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


async def test_a47_ids_that_the_tokenizer_has_not(http: httpx2.AsyncClient) -> None:
    last = 511  # P's output layer is wider than its tokenizer
    for extra in ({}, {"logprobs": 3}):
        answer = await complete(http, prompt="hi", max_tokens=5, logit_bias={str(last): 100}, **extra)
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 5)
    await complete(http, prompt=[5, last], max_tokens=2)
    for wrong in ([512], [-1], [5, 512]):
        assert (await refused(http, prompt=wrong))["param"] == "prompt"
