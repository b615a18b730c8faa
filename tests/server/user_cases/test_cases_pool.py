"""A pool that is too small and queues that are full."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2

from crosspool.units import KiB
from tests.support.awaited import soon
from tests.support.live_deployment import live_deployment
from tests.support.user_case_client import CONTEXT, complete, connect, deployment, until_idle


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


async def test_a18_the_waiting_line_has_an_end(directories: dict[str, Path]) -> None:
    with live_deployment(deployment(directories, max_queue=8, max_num_seqs=4)) as live:
        body = {"prompt": [5] * 8, "max_tokens": 30, "ignore_eos": True, "temperature": 0}

        async def ask(model: str, **changes: Any) -> httpx2.Response:
            return await http.post("/v1/completions", json={**body, "model": model, **changes})

        async with connect(live) as http:
            crowd = [asyncio.create_task(ask("P")) for _ in range(120)]
            others = [asyncio.create_task(ask("Q")) for _ in range(5)]
            answers = [await task for task in crowd]
            assert [(await task).status_code for task in others] == [200] * 5
            accepted = [answer for answer in answers if answer.status_code == 200]
            rejected = [answer for answer in answers if answer.status_code == 429]
            assert len(accepted) + len(rejected) == 120
            assert len(accepted) >= 8
            assert rejected
            assert all(answer.json()["usage"]["completion_tokens"] == 30 for answer in accepted)
            for answer in rejected:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "queue_full"
            await until_idle(live)
            for n, status in ((12, 200), (13, 400)):  # 4 run and 8 wait: more can never be accepted, so nobody retries
                answer = await ask("P", n=n, max_tokens=2)
                assert answer.status_code == status, answer.text
            blocked = [asyncio.create_task(ask("P", max_tokens=900)) for _ in range(12)]
            await soon(lambda: live.stats().models[0].num_queued == 8)
            assert (await ask("P")).status_code == 429
            assert not any(task.done() for task in blocked), "it was not refused at once"
            for task in blocked:
                task.cancel()
            await asyncio.gather(*blocked, return_exceptions=True)
            await until_idle(live)


async def test_a18_a_request_past_its_deadline_costs_no_prefill(directories: dict[str, Path]) -> None:
    with live_deployment(deployment(directories, max_num_seqs=1, queue_timeout_s=0.2)) as live:
        async with connect(live) as http:
            long = {"prompt": [5] * 8, "max_tokens": 900, "ignore_eos": True}
            running = asyncio.create_task(complete(http, **long))
            await soon(lambda: live.stats().models[0].num_decoding == 1)
            late = await http.post("/v1/completions", json={"model": "P", "prompt": [6] * 333, "max_tokens": 2})
            assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
            assert not running.done()
            assert live.stats().models[0].prompt_tokens < 333
            await running


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
