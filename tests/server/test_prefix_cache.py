"""The prefix cache as clients see it: cached tokens in every shape of usage, salts, the off switch, the numbers."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from crosspool.commands.ps import models_table
from crosspool.config import DeploymentConfig, ModelConfig, SchedulingConfig, ServerConfig
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.tiny_models import write_tiny_model

LONG = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DeploymentConfig:
    root = tmp_path_factory.mktemp("models")
    families = {"P": "qwen3_moe", "Q": "deepseek_v2"}
    return DeploymentConfig(
        models=tuple(
            ModelConfig(source=str(write_tiny_model(root / name, family, num_layers=2)), name=name, page_tokens=16)
            for name, family in families.items()
        ),
        pools=PoolsConfig(layout="inprocess", kv_pool_bytes=16 * MiB, frame_bytes=64 * KiB),
        scheduling=SchedulingConfig(max_num_batched_tokens=32),
        server=ServerConfig(admin_api_keys=("boss",)),
    )


@pytest.fixture(scope="module")
def live(config: DeploymentConfig) -> Iterator[LiveDeployment]:
    with live_deployment(config) as found:
        yield found


@pytest.fixture
def client(live: LiveDeployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def num_prefill_steps(live: LiveDeployment, since_s: float) -> int:
    return sum(span.phase == "prefill" for span in live.engine.engine.steps_since(since_s))


def chat(client: OpenAI, text: str, model: str = "P", **changes: Any) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=8, temperature=0, **changes
    )


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def test_a_second_question_with_the_same_beginning_is_prefilled_in_fewer_steps(live: LiveDeployment, client: OpenAI):
    begun_s = live.stats().now_s
    first = chat(client, LONG + "Who said so?")
    then_s = live.stats().now_s
    second = chat(client, LONG + "When was it?")
    assert cached(first) == 0
    assert cached(second) >= 80
    assert cached(second) % 16 == 0
    assert cached(second) < second.usage.prompt_tokens
    full, rest = num_prefill_steps(live, begun_s) - num_prefill_steps(live, then_s), num_prefill_steps(live, then_s)
    assert full == -(-first.usage.prompt_tokens // 32)
    assert rest == -(-(second.usage.prompt_tokens - cached(second)) // 32) < full
    again = chat(client, LONG + "Who said so?")
    assert again.choices[0].message.content == first.choices[0].message.content
    assert chat(client, LONG + "Who said so?", model="Q").usage.prompt_tokens_details.cached_tokens == 0


def test_streams_and_completions_tell_it_too(client: OpenAI):
    prompt = [7 + index for index in range(50)]
    completion = [client.completions.create(model="P", prompt=prompt, max_tokens=2) for _ in range(2)][-1]
    assert (cached(completion), completion.usage.prompt_tokens) == (48, 50)
    stream = client.completions.create(
        model="P", prompt=[prompt, prompt], max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    assert [cached(chunk) for chunk in stream if chunk.usage] == [96]


def test_responses_and_messages_tell_it_in_their_own_words(live: LiveDeployment, client: OpenAI):
    asked = LONG + "And whose words are these?"
    first = [client.responses.create(model="Q", input=asked, max_output_tokens=4) for _ in range(2)][-1].usage
    assert first.input_tokens > first.input_tokens_details.cached_tokens >= 80
    with Anthropic(base_url=live.url, api_key="unused", max_retries=0) as anthropic:
        usage = anthropic.messages.create(model="Q", max_tokens=4, messages=[{"role": "user", "content": asked}]).usage
    assert usage.cache_read_input_tokens == first.input_tokens_details.cached_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == first.input_tokens


def test_a_salt_is_taken_by_every_route_and_parts_what_is_cached(live: LiveDeployment, client: OpenAI):
    asked = LONG + "What is this?"
    chat(client, asked)
    assert cached(chat(client, asked)) > 0
    mine = {"cache_salt": "mine"}
    assert cached(chat(client, asked, extra_body=mine)) == 0
    assert cached(chat(client, asked, extra_body=mine)) > 0
    response = client.responses.create(model="P", input=asked, max_output_tokens=4, extra_body=mine)
    assert response.usage.input_tokens_details.cached_tokens > 0
    with Anthropic(base_url=live.url, api_key="unused", max_retries=0) as anthropic:
        question: Any = {"model": "P", "max_tokens": 4, "messages": [{"role": "user", "content": asked}]}
        assert anthropic.messages.create(**question, extra_body=mine).usage.cache_read_input_tokens > 0
        other = anthropic.messages.create(**question, extra_body={"cache_salt": "other"})
        assert other.usage.cache_read_input_tokens == 0


@pytest.mark.parametrize("salt", ["", "x" * 257, 7, ["a"]])
def test_a_salt_that_is_none_is_refused_by_name(client: OpenAI, salt: Any):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "hello", extra_body={"cache_salt": salt})
    assert refused.value.param == "cache_salt"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="P", input="hello", extra_body={"cache_salt": salt})
    assert refused.value.param == "cache_salt"


def metrics(live: LiveDeployment) -> dict[tuple[str, str | None, str | None], float]:
    """By name, model or pool, and state."""
    return {
        (
            sample.name,
            sample.labels.get("model_name", sample.labels.get("pool")),
            sample.labels.get("state"),
        ): sample.value
        for family in text_string_to_metric_families(httpx2.get(f"{live.url}/metrics").text)
        for sample in family.samples
    }


def test_the_numbers_are_in_the_metrics_and_add_up(live: LiveDeployment, client: OpenAI):
    live.until_idle()  # an answer of the test before may have a step ahead
    before = metrics(live)
    prompt = [300 + index for index in range(40)]
    for _ in range(2):
        client.completions.create(model="P", prompt=prompt, max_tokens=2)
        live.until_idle()
    after = metrics(live)

    def gained(name: str) -> float:
        return after[f"crosspool:{name}_total", "P", None] - before[f"crosspool:{name}_total", "P", None]

    assert (gained("prefix_cache_queries"), gained("prefix_cache_hits")) == (80, 32)
    assert after["crosspool:kv_pages", "P", "reusable"] - before["crosspool:kv_pages", "P", "reusable"] == 2
    states = [after["crosspool:pool_bytes", "kv", state] for state in ("used", "reserved", "reusable", "free")]
    assert sum(states) == live.stats().pools[0].frames_budget * 64 * KiB
    assert states[:2] == [0, 0]


def test_switched_off_every_token_is_computed(config: DeploymentConfig):
    off = replace(config, scheduling=replace(config.scheduling, enable_prefix_caching=False))
    with live_deployment(off) as live, OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        answers = [chat(client, LONG) for _ in range(2)]
        assert [cached(answer) for answer in answers] == [0, 0]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
        assert live.stats().pools[0].frames_reusable == 0


def test_a_conversation_that_made_room_comes_back_from_host_memory_and_the_numbers_say_so(config: DeploymentConfig):
    host = replace(config, pools=replace(config.pools, kv_pool_bytes=30 * 64 * KiB, host_pool_bytes=100 * 64 * KiB))
    with live_deployment(host) as live, OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        prompt, answers = list(range(100, 300)), []
        for number in range(3):
            answers.append(client.completions.create(model="P", prompt=prompt, max_tokens=4, temperature=0))
            client.completions.create(model="Q", prompt=[5 + number] * 380, max_tokens=4)
        assert [cached(answer) for answer in answers] == [0, 192, 192]
        assert len({answer.choices[0].text for answer in answers}) == 1
        found = metrics(live)
        assert found["crosspool:prefix_cache_brought_back_total", "P", None] >= 10
        assert found["crosspool:prefix_cache_stowed_total", "Q", None] >= 20
        (pool,), models = live.stats().pools, live.stats().models
        assert pool.host_frames_used == sum(model.frames_stowed for model in models) <= pool.host_frames_budget == 99
        stats = httpx2.get(f"{live.url}/stats").json()
        shown = Console(width=120, file=io.StringIO())
        shown.print(models_table(stats, 120))
        assert "STOWED" in shown.file.getvalue()
        assert "CONTEXT" in shown.file.getvalue()
        shown = Console(width=80, file=io.StringIO())
        shown.print(models_table(stats, 80))
        assert "STOWED" in shown.file.getvalue()
        assert "CONTEXT" not in shown.file.getvalue(), "the names would have no place"


def test_a32_idle_models_pages_are_the_others_at_once_and_a_trim_gives_them_back(config: DeploymentConfig):
    """48 requests of mixed lengths to P, then nothing: Q can have the whole pool, with or without a trim."""
    boss = {"Authorization": "Bearer boss"}
    small = replace(config, pools=replace(config.pools, kv_pool_bytes=60 * 64 * KiB))
    rng = random.Random(32)
    with live_deployment(small) as live, httpx2.Client(base_url=live.url, timeout=60, headers=boss) as http:

        def fill(count: int) -> None:
            for _ in range(count):
                body = {"model": "P", "prompt": [rng.randrange(1, 500) for _ in range(rng.randint(20, 400))]}
                assert http.post("/v1/completions", json={**body, "max_tokens": 10}).status_code == 200

        fill(48)
        live.until_idle()
        (pool,) = live.stats().pools
        assert pool.frames_reusable > 40
        pages = live.stats().models[1].frames_per_page
        most = pool.frames_budget // pages * 16
        whole = {"model": "Q", "prompt": [5] * (most - 20), "max_tokens": 20, "ignore_eos": True}
        assert http.post("/v1/completions", json=whole).status_code == 200
        fill(6)
        live.until_idle()
        assert http.post("/admin/prefix_cache/trim", headers={"Authorization": "Bearer x"}).status_code == 401
        freed = http.post("/admin/prefix_cache/trim", json={"model": "Q"}).json()["freed_bytes"]
        assert freed.keys() == {"Q"}
        assert http.post("/admin/prefix_cache/trim").json()["freed_bytes"]["P"] > 0
        (pool,) = live.stats().pools
        assert pool.frames_free == pool.frames_budget
        unknown = http.post("/admin/prefix_cache/trim", json={"model": "nonesuch"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
