"""Health by forward progress, readiness, /stats, /version and the metrics' names and sums."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from crosspool import __version__
from crosspool.errors import WorkerLostError
from crosspool.server.metrics_compat import SHARED
from tests.support.fake_engine import FakeEngine, Script
from tests.support.server_fixtures import connect, fake_app

PROMPT = {"model": "tiny", "prompt": "hi", "max_tokens": 4}


@pytest.mark.parametrize(
    ("busy_for_s", "down_for_s", "status", "state"),
    [
        (None, None, 200, "idle"),
        (2.0, None, 200, "busy"),
        (31.0, None, 503, "stuck"),
        (None, 5.0, 200, "recovering"),
        (31.0, 5.0, 200, "recovering"),
        (None, 59.0, 200, "recovering"),  # requests wait for it for 60 s
        (None, 61.0, 503, "stuck"),
    ],
)
async def test_health_tells_progress(
    http: httpx2.AsyncClient,
    engine: FakeEngine,
    busy_for_s: float | None,
    down_for_s: float | None,
    status: int,
    state: str,
) -> None:
    engine.busy_for_s = busy_for_s
    engine.ranks_down = {} if down_for_s is None else {"w0": down_for_s}
    for path in ("/health", "/health/ready"):
        response = await http.get(path)
        assert (response.status_code, response.json()["status"]) == (status, state)
    if state != "idle":
        assert response.json()["for_s"] == pytest.approx(down_for_s or busy_for_s, abs=1)


async def test_a_dead_engine_is_not_healthy(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    engine.failure = WorkerLostError("the engine failed: KeyError")
    response = await http.get("/health")
    assert (response.status_code, response.json()["status"]) == (503, "stopped")
    assert "KeyError" in response.json()["detail"]


async def test_readiness_waits_for_every_model(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    engine.states["other"] = "loading"
    response = await http.get("/health/ready")
    assert (response.status_code, response.json()) == (503, {"status": "loading", "detail": "loading other"})
    assert (await http.get("/health")).status_code == 200
    refused = await http.post("/v1/completions", json={**PROMPT, "model": "other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_ready")
    engine.states["other"] = "failed"
    assert (await http.get("/health/ready")).status_code == 200
    engine.states["tiny"] = "failed"
    assert (await http.get("/health/ready")).status_code == 503


async def test_draining_is_not_ready_and_refuses(engine: FakeEngine, tmp_path: Path) -> None:
    app = fake_app(engine, tmp_path)
    app.state.draining = True
    async with connect(app) as http:
        assert (await http.get("/health/ready")).json() == {"status": "draining"}
        assert (await http.get("/health")).status_code == 200
        refused = await http.post("/v1/completions", json=PROMPT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


async def test_prompts_too_long_for_the_context_are_counted_on_every_route(http: httpx2.AsyncClient) -> None:
    long = [{"role": "user", "content": "a b " * 100_000}]
    for path, body in (
        ("/v1/completions", {"prompt": "hi", "max_tokens": 10**6}),
        ("/v1/completions", {"prompt": "a b " * 100_000}),
        ("/v1/chat/completions", {"messages": long}),
        ("/v1/messages", {"messages": long, "max_tokens": 5}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 10**6}),
        ("/tokenize", {"messages": long}),  # where no length is too long
    ):
        await http.post(path, json={"model": "tiny", **body})
    wanted = 'crosspool:admission_rejections_total{model_name="tiny",reason="context_length_exceeded"} 5.0'
    assert wanted in (await http.get("/metrics")).text.splitlines()


async def test_metrics_have_vllms_suffixes_and_add_up(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    await http.post("/v1/completions", json={**PROMPT, "n": 2})
    engine.max_queue = 0
    await http.post("/v1/completions", json=PROMPT)
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    tiny = ("model_name", "tiny")
    for suffix, value in {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0.04,
        "prompt_tokens_total": 7,
        "generation_tokens_total": 9,
        "prefix_cache_queries_total": 40,
        "prefix_cache_hits_total": 32,
        "prefix_cache_evictions_total": 5,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 6,
        "request_time_per_output_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 2,
        "request_prompt_tokens_sum": 4,
        "request_generation_tokens_sum": 8,
    }.items():
        assert samples[(f"crosspool:{suffix}", tiny)] == value, suffix
    assert samples[("crosspool:request_success_total", ("finished_reason", "length"), tiny)] == 2
    assert samples[("crosspool:admission_rejections_total", tiny, ("reason", "queue_full"))] == 1
    decode = ("model_name", "tiny"), ("phase", "decode")
    for suffix, value in {
        "attention_seconds_count": 8,
        "attention_seconds_sum": 0.5,
        "ffn_seconds_count": 4,
        "ffn_seconds_sum": 0.25,
        "transfer_seconds_count": 4,
        "transfer_seconds_sum": 0.125,
        "iteration_tokens_total_count": 8,
        "iteration_tokens_total_sum": 9,
    }.items():
        assert samples[(f"crosspool:{suffix}", *decode)] == value, suffix
    assert samples[("crosspool:weight_bytes_moved_total", tiny)] == 300
    assert samples[("crosspool:expert_tokens_total", ("layer", "1"), tiny)] == 2 * 9
    assert ("crosspool:expert_tokens_total", ("layer", "0"), tiny) not in samples  # a dense layer
    assert samples["crosspool:server_tasks",] >= 1
    kv = {key: value for key, value in samples.items() if key[0] == "crosspool:pool_bytes" and ("pool", "kv") in key}
    by_rank = {key: value for key, value in samples.items() if key[0] == "crosspool:kv_rank_bytes"}
    assert sum(by_rank.values()) > 0
    for state in ("used", "reserved", "reusable"):
        own = sum(value for key, value in by_rank.items() if ("state", state) in key)
        assert own == sum(value for key, value in kv.items() if ("state", state) in key)
    assert len(kv) == 4
    assert sum(kv.values()) == 100 * 4096
    assert all(key[0].startswith("crosspool:") for key in samples)


async def test_vllms_names_are_shown_beside_ours_when_asked_for(engine: FakeEngine, tmp_path: Path) -> None:
    async with connect(fake_app(engine, tmp_path, metrics_compat="vllm")) as http:
        await http.post("/v1/completions", json=PROMPT)
        text = (await http.get("/metrics")).text
    values: dict[str, dict[str, float]] = {"crosspool": {}, "vllm": {}}
    for family in text_string_to_metric_families(text):
        prefix, _, name = family.name.partition(":")
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "engine"}
            values[prefix][f"{sample.name.partition(':')[2]}{sorted(labels.items())}"] = sample.value
        assert prefix == "crosspool" or name.removesuffix("_created") in SHARED
    assert {name.partition("[")[0].removesuffix("_total") for name in values["vllm"]} >= {
        name for name in SHARED if not name.endswith("_seconds")
    }
    created = {name for name in values["vllm"] if "_created" in name}
    assert len(values["vllm"]) > 12
    assert {name: values["crosspool"][name] for name in values["vllm"].keys() - created} == {
        name: values["vllm"][name] for name in values["vllm"].keys() - created
    }


async def test_stats_show_pools_models_and_time_between_tokens(http: httpx2.AsyncClient, engine: FakeEngine) -> None:
    engine.scripts["tiny"] = Script(delay_s=0.01)
    await http.post("/v1/completions", json=PROMPT)
    stats = (await http.get("/stats")).json()
    assert stats["version"] == __version__
    assert stats["health"] == {"status": "idle"}
    assert [card["id"] for card in stats["cards"]] == ["tiny", "other"]
    assert stats["pools"][0]["frames_budget"] == 100
    assert stats["tbt_s"]["tiny"]["p50"] >= 0.009
    assert "other" not in stats["tbt_s"]
    assert (await http.get("/version")).json() == {"version": __version__}


async def test_a_probe_that_asks_with_head_sees_an_engine_that_is_stuck(http: httpx2.AsyncClient, engine: FakeEngine):
    engine.busy_for_s = 31.0
    assert (await http.head("/health")).status_code == 503
