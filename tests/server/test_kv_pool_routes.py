"""GET and PATCH /admin/limits and `crosspool limits`, on a real engine with two models of one pool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from crosspool import cli
from crosspool.config import DeploymentConfig, ModelConfig, ServerConfig
from crosspool.errors import CrossPoolError, UnknownModelError
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB
from tests.support.fake_engine import FakeEngine
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.server_fixtures import connect, fake_app
from tests.support.tiny_models import write_tiny_model

FRAME = 64 * KiB
NUM_FRAMES = 40
ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDeployment]:
    root = tmp_path_factory.mktemp("models")
    config = DeploymentConfig(
        models=(
            ModelConfig(
                source=str(write_tiny_model(root / "Q", "qwen3_moe", num_layers=2, max_position_embeddings=8192)),
                page_tokens=16,
                kv_floor_bytes=4 * FRAME,
                aliases=("qq",),
            ),
            ModelConfig(
                source=str(write_tiny_model(root / "P", "deepseek_v2", num_layers=2, max_position_embeddings=8192)),
                page_tokens=16,
            ),
        ),
        pools=PoolsConfig(layout="inprocess", kv_pool_bytes=(NUM_FRAMES + 1) * FRAME, frame_bytes=FRAME),
        server=ServerConfig(admin_api_keys=("boss",)),
    )
    with live_deployment(config) as found:
        yield found


@pytest.fixture
async def http(live: LiveDeployment) -> Any:
    """A client of the running server, whose limits are put back afterwards."""
    reset = {"budget": NUM_FRAMES * FRAME, "models": {"Q": {"floor": 4 * FRAME, "ceiling": None}}}
    reset["models"]["P"] = {"floor": 0, "ceiling": None}
    async with httpx2.AsyncClient(base_url=live.url, headers=ADMIN, timeout=30) as client:
        yield client
        assert (await client.patch("/admin/limits", json=reset)).status_code == 200


async def limits(http: httpx2.AsyncClient, **change: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    answer = await (http.patch("/admin/limits", json=change) if change else http.get("/admin/limits"))
    assert answer.status_code == 200, answer.text
    (pool,) = answer.json()["pools"]
    return pool, {row["name"]: row for row in answer.json()["models"]}


async def ask(http: httpx2.AsyncClient, model: str, prompt: int, max_tokens: int) -> httpx2.Response:
    body = {"model": model, "prompt": [7] * prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return await http.post("/v1/completions", json=body)


async def test_limits_are_shown_with_what_is_held(http: httpx2.AsyncClient) -> None:
    pool, models = await limits(http)
    assert (pool["pool_bytes"], pool["budget_bytes"]) == (NUM_FRAMES * FRAME, NUM_FRAMES * FRAME)
    assert (pool["floors_bytes"], pool["used_bytes"], pool["settling"]) == (4 * FRAME, 0, False)
    assert (models["Q"]["floor_bytes"], models["Q"]["ceiling_bytes"]) == (4 * FRAME, None)
    assert models["Q"]["reach_bytes"] == NUM_FRAMES * FRAME
    assert models["P"]["reach_bytes"] == (NUM_FRAMES - 4) * FRAME


async def test_a_change_holds_for_the_next_request_and_for_the_published_context(http: httpx2.AsyncClient) -> None:
    page = (await limits(http))[1]["P"]["page_bytes"]
    _, models = await limits(http, models={"P": {"ceiling": 4 * page}})
    assert models["P"]["ceiling_bytes"] == 4 * page
    assert models["P"]["context_limit"] == 4 * 16
    cards = {card["id"]: card for card in (await http.get("/v1/models", headers=ADMIN)).json()["data"]}
    assert cards["P"]["max_model_len"] == 4 * 16
    assert (await ask(http, "P", 10, 54)).status_code == 200
    refused = await ask(http, "P", 10, 55)
    assert refused.status_code == 400
    assert "the context limit is 64 tokens" in refused.json()["error"]["message"]
    assert (await ask(http, "Q", 10, 55)).status_code == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": "1GiB"}, "a budget of 1.0 GiB is more than the 2.5 MiB that the KV pool has"),
        ({"models": {"P": {"floor": "2400KiB"}}}, "the floors add up to"),
        ({"models": {"qq": {"ceiling": "1KiB"}}}, "a ceiling of 0 B for Q is less than one page of it"),
        ({"models": {"Q": {"ceiling": 2 * FRAME}}}, "a floor of 256.0 KiB for Q is above its ceiling of 128.0 KiB"),
        ({"models": {"P": {"floor": "much"}}}, "'much' is not a size"),
        ({"models": {"P": {"flor": 1}}}, "flor"),
        ({"budget": -5}, "the budget is -5 bytes"),
    ],
)
async def test_what_cannot_be_held_is_a_400_and_changes_nothing(
    http: httpx2.AsyncClient, change: dict[str, Any], message: str
) -> None:
    before = await limits(http)
    answer = await http.patch("/admin/limits", json=change)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert await limits(http) == before


async def test_an_unknown_model_is_a_404_and_a_plain_key_is_not_enough(http: httpx2.AsyncClient) -> None:
    answer = await http.patch("/admin/limits", json={"models": {"nobody": {"floor": 0}}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await http.get("/admin/limits", headers={"Authorization": "Bearer guess"})).status_code == 401


async def test_shrinking_under_load_lets_live_requests_end_whole(
    live: LiveDeployment, http: httpx2.AsyncClient
) -> None:
    page = (await limits(http))[1]["P"]["page_bytes"]
    for _ in range(10):  # a busy machine may look away for as long as a request takes
        running = asyncio.create_task(ask(http, "P", 16, 250))
        while not running.done() and not any(load.num_decoding for load in live.stats().models):
            await asyncio.sleep(0.002)
        pool, _ = await limits(http, budget=6 * page)
        assert (await running).json()["usage"]["completion_tokens"] == 250
        after, _ = await limits(http)
        assert not after["settling"]
        assert after["budget_bytes"] == 6 * page
        if pool["settling"]:
            return
        await limits(http, budget=NUM_FRAMES * FRAME)
    raise AssertionError("no request was caught running")


def command(live: LiveDeployment, *arguments: str) -> str:
    found = CliRunner().invoke(cli.app, ["limits", *arguments, "--base-url", live.url, "--admin-api-key", "boss"])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


async def test_the_command_shows_and_changes(live: LiveDeployment, http: httpx2.AsyncClient) -> None:
    shown = await asyncio.to_thread(command, live)
    assert "kv0: budget 2.5 MiB of 2.5 MiB, 256.0 KiB kept by floors" in shown
    assert "CEILING" in shown
    changed = await asyncio.to_thread(
        command, live, "qq", "--floor", "0", "--ceiling", "1MiB", "--budget", "2MiB", "--json"
    )
    (pool,) = json.loads(changed)["pools"]
    models = {row["name"]: row for row in json.loads(changed)["models"]}
    assert (pool["budget_bytes"], models["Q"]["floor_bytes"]) == (32 * FRAME, 0)
    assert models["Q"]["ceiling_bytes"] <= 16 * FRAME
    unbound = json.loads(await asyncio.to_thread(command, live, "Q", "--ceiling", "none", "--json"))
    assert unbound["models"][0]["ceiling_bytes"] is None
    with pytest.raises(CrossPoolError, match=r"a budget of 3\.0 GiB is more than .* \(HTTP 400\)"):
        await asyncio.to_thread(command, live, "--budget", "3GiB")
    with pytest.raises(CrossPoolError, match="name it: crosspool limits MODEL"):
        await asyncio.to_thread(command, live, "--floor", "1MiB")


async def test_without_an_admin_key_nobody_changes_limits(tmp_path: Path) -> None:
    engine = FakeEngine(("tiny",))
    async with connect(fake_app(engine, tmp_path, api_keys=("k",))) as client:
        client.headers.update({"Authorization": "Bearer k"})
        assert (await client.patch("/admin/limits", json={"budget": 1})).status_code == 403
    assert not engine.limit_changes


async def test_a_model_that_goes_while_pages_are_given_back_costs_the_others_nothing(tmp_path: Path) -> None:
    class Going(FakeEngine):
        def trim(self, model: str) -> int:
            if model == "gone":
                raise UnknownModelError("no model 'gone' is served")
            return super().trim(model)

    async with connect(fake_app(Going(("tiny", "gone")), tmp_path, admin_api_keys=("boss",))) as http:
        answer = await http.post("/admin/prefix_cache/trim", json={}, headers=ADMIN)
        assert (answer.status_code, answer.json()["freed_bytes"]) == (200, {"tiny": 6 * 4096})
