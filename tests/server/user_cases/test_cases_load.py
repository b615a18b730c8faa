"""User cases about budgets, company and numbers, as requests to a whole server with a real engine and real workers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.real_cluster import children
from tests.support.user_case_client import CONTEXT, connect


def deployment(directories: dict[str, Path], order: str = "PQ", layout: Any = "inprocess") -> DeploymentConfig:
    return DeploymentConfig(
        models=tuple(ModelConfig(source=str(directories[name]), name=name, page_tokens=16) for name in order),
        pools=PoolsConfig(layout=layout, kv_pool_bytes=16 * MiB, frame_bytes=64 * KiB),
        scheduling=SchedulingConfig(max_queue=200),
    )


@pytest.fixture(scope="module")
def live(directories: dict[str, Path]) -> Iterator[LiveDeployment]:
    with live_deployment(deployment(directories)) as found:
        yield found


async def complete(http: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json={"model": "P", "temperature": 0, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a01_what_a_model_may_use_does_not_depend_on_start_order_or_neighbours(
    directories: dict[str, Path],
) -> None:
    seen = []
    for order in ("PQ", "QP"):
        with live_deployment(deployment(directories, order)) as live:
            async with connect(live) as http:
                busy = [
                    asyncio.create_task(complete(http, prompt="the sea", max_tokens=200, model=order[0]))
                    for _ in range(20)
                ]
                cards = (await http.get("/v1/models")).json()["data"]
                limits = {card["id"]: card["max_model_len"] for card in cards}
                pools = [(pool.kv_rank, pool.frames_budget) for pool in live.stats().pools]
                await asyncio.gather(*busy)
                seen.append((limits, pools))
    assert seen[0] == seen[1]


async def test_a24_idle_models_burn_no_core_and_the_first_token_after_that_is_quick(
    directories: dict[str, Path],
) -> None:
    with live_deployment(deployment(directories, layout="processes")) as live:
        async with connect(live) as http:
            for _ in range(3):
                await complete(http, prompt="the sea", max_tokens=8)
            workers = [psutil.Process(pid) for pid in children()]
            assert len(workers) == 2
            before, started = [sum(worker.cpu_times()[:2]) for worker in workers], time.monotonic()
            await asyncio.sleep(3.0)
            after = [sum(worker.cpu_times()[:2]) for worker in workers]
            spent = sum(after) - sum(before)
            assert spent < 0.05 * (time.monotonic() - started), f"{spent:.3f} s of a core in 3 idle seconds"
            await complete(http, prompt="the sea", max_tokens=1)


async def test_a29_short_prompts_do_not_wait_for_all_of_a_long_one(live: LiveDeployment) -> None:
    """The long prompt is prefilled in chunks; short ones of either model get their turns between these."""
    async with connect(live) as http:
        ends: dict[str, float] = {}

        async def timed(name: str, **body: Any) -> None:
            await complete(http, max_tokens=1, **body)
            ends[name] = time.monotonic()

        words = [7 + index % 300 for index in range(1005)]  # from another word on each: nothing of them is cached
        long = [asyncio.create_task(timed(f"long {index}", prompt=words[index:][:1000])) for index in range(6)]
        await asyncio.sleep(0)
        short = [asyncio.create_task(timed(f"short {model}", prompt=[7, 8, 9], model=model)) for model in ("Q", "P")]
        await asyncio.gather(*long, *short)
        last_long = max(end for name, end in ends.items() if name.startswith("long"))
        assert ends["short Q"] < last_long
        assert ends["short P"] < last_long


async def test_a30_the_same_request_alone_or_in_company_has_the_same_logprobs(live: LiveDeployment) -> None:
    async with connect(live) as http:
        prompt = [7 + index % 200 for index in range(120)]
        asked = {"prompt": prompt, "max_tokens": 16, "logprobs": 2}
        alone = (await complete(http, **asked))["choices"][0]
        company = [
            asyncio.create_task(complete(http, prompt=[9 + index] * (5 + index), max_tokens=60, model="PQ"[index % 2]))
            for index in range(12)
        ]
        beside = (await complete(http, **asked))["choices"][0]
        await asyncio.gather(*company)
        again = (await complete(http, **asked))["choices"][0]
    for other in (beside, again):
        assert other["logprobs"]["token_logprobs"] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-3)
        assert other["text"] == alone["text"]


async def test_a50_a_second_longer_turn_is_whole_and_what_is_over_the_limit_is_refused(live: LiveDeployment) -> None:
    async with connect(live) as http:
        first = await complete(http, prompt=[7] * 40, max_tokens=120)
        assert first["usage"] == {**first["usage"], "prompt_tokens": 40, "completion_tokens": 120}
        second = await complete(http, prompt=[7] * 160 + [8] * 300, max_tokens=CONTEXT - 460)
        assert second["usage"]["completion_tokens"] == CONTEXT - 460
        over = await http.post(
            "/v1/completions", json={"model": "P", "prompt": [7] * 460, "max_tokens": CONTEXT - 459, "stream": True}
        )
        assert (over.status_code, over.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a51_gauges_add_up_at_every_moment_and_are_nothing_when_idle(live: LiveDeployment) -> None:
    counters: dict[str, float] = {}
    async with connect(live) as http:

        async def look() -> dict[tuple[Any, ...], float]:
            text = (await http.get("/metrics")).text
            found = {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            pool = {
                key: value for key, value in found.items() if key[0] == "crosspool:pool_bytes" and ("pool", "kv") in key
            }
            used, free, reserved, reusable = (
                next(value for key, value in pool.items() if ("state", state) in key)
                for state in ("used", "free", "reserved", "reusable")
            )
            budget = used + free + reserved + reusable
            assert budget == live.stats().pools[0].frames_budget * 64 * KiB
            shares = [value for key, value in found.items() if key[0] == "crosspool:kv_cache_usage_perc"]
            assert sum(shares) == pytest.approx(used / budget)
            for key, value in found.items():
                if key[0].endswith("_total"):
                    assert value >= counters.get(str(key), 0.0), key
                    counters[str(key)] = value
            return found

        tasks = [
            asyncio.create_task(complete(http, prompt=[7] * 50, max_tokens=50, model=model))
            for model, _ in itertools.product("PQ", range(15))
        ]
        while not all(task.done() for task in tasks):
            await look()
        idle = await look()
        for key, value in idle.items():
            if key[0] in ("crosspool:num_requests_running", "crosspool:num_requests_waiting", "crosspool:kv_pages"):
                assert value == 0 or ("state", "reusable") in key, key
