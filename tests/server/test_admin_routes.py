"""Models loaded and unloaded at run time, and who may do it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from crosspool.config import ModelConfig, ServerConfig
from crosspool.errors import CapacityError, CheckpointError, WorkerLostError
from crosspool.server.app import create_app
from crosspool.server.catalogue import Catalogue, ModelFrontend
from tests.support.awaited import soon
from tests.support.fake_engine import FakeEngine, Script
from tests.support.server_fixtures import connect, tiny_frontend

ADMIN = {"Authorization": "Bearer boss"}


@dataclass
class Named:
    """All of a ServedModel that the fake engine looks at."""

    name: str


@dataclass
class PreparedFake:
    served: Any
    frontend: ModelFrontend


def app_of(engine: FakeEngine, directory: Path, **settings: Any) -> FastAPI:
    def prepare(config: ModelConfig) -> PreparedFake:
        if config.source == "missing":
            raise CheckpointError("model new: missing does not exist")
        frontend = tiny_frontend(directory / config.served_name, config.served_name, aliases=config.aliases)
        return PreparedFake(Named(config.served_name), frontend)

    frontends = [tiny_frontend(directory / name, name) for name in engine.scripts]
    config = ServerConfig(**{"admin_api_keys": ("boss",), **settings})
    return create_app(engine, Catalogue(frontends), config, prepare)


@pytest.fixture
async def admin(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with connect(app_of(engine, tmp_path)) as http:
        http.headers.update(ADMIN)
        yield http


async def ask(http: httpx2.AsyncClient, model: str, **more: Any) -> httpx2.Response:
    return await http.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 2, **more})


async def test_a_model_comes_answers_and_goes(admin: httpx2.AsyncClient, engine: FakeEngine) -> None:
    assert (await ask(admin, "new")).status_code == 404
    loaded = await admin.post("/admin/models/new/load", json={"path": "somewhere", "aliases": ["also"]})
    assert loaded.status_code == 200, loaded.text
    rows = {row["name"]: row for row in loaded.json()["models"]}
    assert (rows["new"]["state"], rows["new"]["aliases"]) == ("ready", ["also"])
    assert (await ask(admin, "also")).json()["model"] == "new"
    assert [card["id"] for card in (await admin.get("/v1/models")).json()["data"]] == ["tiny", "other", "new"]
    assert (await admin.post("/admin/models/also/unload")).status_code == 200
    assert (await ask(admin, "new")).status_code == 404
    assert (await ask(admin, "tiny")).status_code == 200
    assert [row["name"] for row in (await admin.get("/admin/models")).json()["data"]] == ["tiny", "other"]


async def test_a_load_that_still_prepares_its_model_holds_up_no_end(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosspool.server.admin_routes.LOOK_S", 0.01)
    app, begun, release = app_of(engine, tmp_path), threading.Event(), threading.Event()

    def download(config: ModelConfig) -> PreparedFake:
        begun.set()
        release.wait(30)
        raise CheckpointError("nobody waits for this any more")

    app.state.prepare = download
    async with connect(app) as http:
        loading = asyncio.create_task(http.post("/admin/models/new/load", json={"path": "far/away"}, headers=ADMIN))
        await soon(begun.is_set)
        app.state.draining = True
        answer = await asyncio.wait_for(loading, 10)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "prepare-new"]
    assert thread.daemon, "the process would wait for it"
    release.set()
    thread.join(10)


async def test_a_model_is_prepared_once_however_often_it_is_asked_for(engine: FakeEngine, tmp_path: Path) -> None:
    """A second load would read, or download, all of it beside the first."""
    app, release, asked = app_of(engine, tmp_path), threading.Event(), []
    prepare = app.state.prepare

    def download(config: ModelConfig) -> PreparedFake:
        asked.append(config.served_name)
        release.wait(30)
        return prepare(config)

    app.state.prepare = download
    async with connect(app) as http:
        http.headers.update(ADMIN)
        first = asyncio.create_task(http.post("/admin/models/new/load", json={"path": "missing", "aliases": ["also"]}))
        await soon(lambda: asked == ["new"])
        for name, aliases in (("new", []), ("also", []), ("third", ["new"])):
            answer = await http.post(f"/admin/models/{name}/load", json={"path": "somewhere", "aliases": aliases})
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_loading")
        release.set()
        assert (await first).status_code == 400
        assert asked == ["new"]
        again = await http.post("/admin/models/new/load", json={"path": "somewhere"})
        assert again.status_code == 200, "the name is free after a load that failed"


async def test_other_models_answer_and_a_second_load_is_refused_while_one_loads(
    admin: httpx2.AsyncClient, engine: FakeEngine
) -> None:
    engine.loaded.clear()
    begun = await admin.post("/admin/models/org/new/load", json={"path": "somewhere", "wait": False})
    assert begun.status_code == 202
    assert {row["name"]: row["state"] for row in begun.json()["models"]}["org/new"] == "loading"
    assert (await ask(admin, "tiny")).status_code == 200
    assert (await ask(admin, "org/new")).json()["error"]["code"] == "model_not_ready"
    assert (await admin.get("/health/ready")).status_code == 200  # the others' traffic goes on
    again = await admin.post("/admin/models/org/new/load", json={"path": "somewhere"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "model_exists")
    early = await admin.post("/admin/models/org/new/unload")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "model_loading")
    engine.loaded.set()
    async with asyncio.timeout(5):
        while (await ask(admin, "org/new")).status_code != 200:
            await asyncio.sleep(0.01)


async def test_readiness_waits_for_the_models_of_the_start_alone(admin: httpx2.AsyncClient, engine: FakeEngine) -> None:
    engine.states["other"] = "loading"
    assert (await admin.post("/admin/models/other/unload")).status_code == 409
    assert (await admin.get("/health/ready")).json() == {"status": "loading", "detail": "loading other"}
    engine.states["other"] = "ready"
    assert (await admin.get("/health/ready")).status_code == 200
    assert (await admin.post("/admin/models/other/unload")).status_code == 200
    assert (await admin.get("/health/ready")).status_code == 200
    engine.loaded.clear()  # the same name again, at run time
    await admin.post("/admin/models/other/load", json={"path": "somewhere", "wait": False})
    assert engine.states["other"] == "loading"
    assert (await admin.get("/health/ready")).status_code == 200
    engine.loaded.set()


async def test_a_model_of_the_start_whose_turn_has_not_come_is_told_so(
    admin: httpx2.AsyncClient, engine: FakeEngine
) -> None:
    del engine.scripts["other"]
    for answer in (await ask(admin, "other"), await admin.get("/v1/models/other")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
        assert "its turn has not come yet" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
    assert (await admin.get("/health/ready")).json()["detail"] == "loading other"


async def test_unloading_waits_for_what_runs(admin: httpx2.AsyncClient, engine: FakeEngine) -> None:
    engine.scripts["other"] = Script(delay_s=0.05)
    running = asyncio.create_task(ask(admin, "other", max_tokens=6))
    while not engine.running:
        await asyncio.sleep(0.01)
    gone = await admin.post("/admin/models/other/unload", json={"drain": True})
    assert gone.status_code == 200
    assert running.done() or len(engine.running) == 0
    assert (await running).json()["choices"][0]["finish_reason"] == "length"


async def test_an_unload_of_a_failed_model_leaves_the_one_that_has_come_under_its_name(
    engine: FakeEngine, tmp_path: Path
) -> None:
    app = app_of(engine, tmp_path)
    engine.load_error = CheckpointError("a tensor is cut short")
    async with connect(app) as http:
        http.headers.update(ADMIN)
        assert (await http.post("/admin/models/new/load", json={"path": "somewhere"})).status_code == 400
        engine.load_error, remove = None, engine.remove_model

        async def remove_and_lose_the_turn(name: str, *, drain: bool = True) -> None:
            await remove(name, drain=drain)
            assert (await http.post("/admin/models/new/load", json={"path": "somewhere"})).status_code == 200

        engine.remove_model = remove_and_lose_the_turn  # type: ignore[method-assign]
        assert (await http.post("/admin/models/new/unload")).status_code == 200
        assert (await ask(http, "new")).status_code == 200


async def test_an_unload_that_comes_as_another_ends_is_a_404(admin: httpx2.AsyncClient, engine: FakeEngine) -> None:
    del engine.scripts["tiny"]  # the engine has let it go, and the catalogue does not know yet
    answer = await admin.post("/admin/models/tiny/unload")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_readiness_waits_for_a_model_that_could_not_be_unloaded(
    admin: httpx2.AsyncClient, engine: FakeEngine
) -> None:
    del engine.scripts["other"]  # of the start; its turn to be loaded has not come yet
    assert (await admin.post("/admin/models/other/unload")).status_code == 404
    assert (await admin.get("/health/ready")).json()["detail"] == "loading other"


async def test_what_cannot_be_loaded_leaves_nothing(admin: httpx2.AsyncClient, engine: FakeEngine) -> None:
    missing = await admin.post("/admin/models/new/load", json={"path": "missing"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "path")
    engine.load_error = CheckpointError("a tensor is cut short")
    cut = await admin.post("/admin/models/new/load", json={"path": "somewhere"})
    assert (cut.status_code, cut.json()["error"]["code"]) == (400, "cannot_load")
    engine.load_error = CapacityError("one page is larger than the pool")
    large = await admin.post("/admin/models/large/load", json={"path": "somewhere"})
    assert (large.status_code, large.json()["error"]["code"]) == (400, "cannot_load")
    engine.load_error = WorkerLostError("w0 was lost while it loaded")
    lost = await admin.post("/admin/models/lost/load", json={"path": "somewhere"})
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "worker_lost")
    assert (await ask(admin, "new")).status_code == 404
    for path, body, status in (
        ("/admin/models/tiny/load", {"path": "somewhere"}, 409),
        ("/admin/models/new/load", {"path": "somewhere", "aliases": ["tiny"]}, 409),
        ("/admin/models/new/load", {}, 400),
        ("/admin/models/new/load", {"path": "x", "max_model_len": 1}, 400),
        ("/admin/models//load", {"path": "x"}, 400),
        ("/admin/models/new%2F/load", {"path": "x"}, 400),
        ("/admin/models/new/load", {"path": "x", "aliases": ["also", ""]}, 400),
        ("/admin/models/nope/unload", {}, 404),
    ):
        response = await admin.post(path, json=body)
        assert response.status_code == status, (path, response.text)
        assert response.json()["error"]["message"]


def test_an_alias_that_is_listed_twice_leaves_with_its_model(tmp_path: Path) -> None:
    catalogue = Catalogue([tiny_frontend(tmp_path / "tiny", aliases=("also", "also"))])
    catalogue.remove("tiny")
    assert "also" not in catalogue


async def test_only_an_admin_key_opens_admin_routes(engine: FakeEngine, tmp_path: Path) -> None:
    async with connect(app_of(engine, tmp_path, api_keys=("user",))) as http:
        for key, admin_status, status in ((None, 401, 401), ("user", 401, 200), ("boss", 200, 200), ("x", 401, 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            assert (await http.get("/admin/models", headers=headers)).status_code == admin_status
            assert (await http.get("/v1/models", headers=headers)).status_code == status
        assert (
            await http.post("/admin/models/tiny/unload", headers={"Authorization": "Bearer user"})
        ).status_code == 401
    async with connect(app_of(engine, tmp_path, admin_api_keys=())) as http:
        closed = await http.get("/admin/models", headers=ADMIN)
        assert (closed.status_code, closed.json()["error"]["code"]) == (403, "admin_closed")
        assert "--admin-api-key" in closed.json()["error"]["message"]
    assert "tiny" in engine.scripts


async def test_each_request_tells_the_engine_whose_it_is(engine: FakeEngine, tmp_path: Path) -> None:
    async with connect(app_of(engine, tmp_path, api_keys=("one", "two"))) as http:
        for key in ("one", "two", "boss"):
            http.headers["Authorization"] = f"Bearer {key}"
            await ask(http, "tiny", stream=key == "two")
    assert [request.key for request in engine.requests] == ["key1", "key2", "admin1"]
