"""`crosspool load` and `crosspool unload` against a server with a real engine."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from crosspool import cli
from crosspool.commands import models
from crosspool.config import DeploymentConfig, ModelConfig, ServerConfig
from crosspool.errors import CrossPoolError
from crosspool.pools_config import PoolsConfig
from crosspool.units import KiB, MiB
from tests.support.awaited import until
from tests.support.live_deployment import LiveDeployment, live_deployment
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe", max_position_embeddings=256)


@pytest.fixture(scope="module")
def live(directory: Path) -> Iterator[LiveDeployment]:
    config = DeploymentConfig(
        models=(ModelConfig(source=str(directory), name="first"),),
        pools=PoolsConfig(layout="inprocess", kv_pool_bytes=8 * MiB, frame_bytes=64 * KiB),
        server=ServerConfig(admin_api_keys=("boss",)),
    )
    with live_deployment(config) as found:
        yield found


def call(live: LiveDeployment, *arguments: str, key: str = "boss") -> Result:
    return CliRunner().invoke(cli.app, [*arguments, "--base-url", live.url, "--admin-api-key", key])


def names(live: LiveDeployment) -> list[str]:
    return [model.name for model in live.engine.models()]


def answer(live: LiveDeployment, model: str) -> httpx2.Response:
    return httpx2.post(f"{live.url}/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 2}, timeout=30)


def test_a_model_comes_answers_and_goes(live: LiveDeployment, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)  # a relative path is this machine's, not the server's
    came = call(live, "load", "tiny", "--alias", "small", "--max-model-len", "64")
    assert came.exit_code == 0, came.output
    assert "loaded tiny: " in came.stdout
    assert "context 64 tokens" in came.stdout
    assert answer(live, "small").json()["model"] == "tiny"
    rows = httpx2.get(f"{live.url}/admin/models", headers={"Authorization": "Bearer boss"}).json()["data"]
    assert {row["name"]: row["source"] for row in rows}["tiny"] == str(directory)
    went = call(live, "unload", "small")
    assert went.stdout == "unloaded tiny\n"
    assert names(live) == ["first"]
    assert answer(live, "tiny").status_code == 404


def test_a_name_may_be_given(live: LiveDeployment, directory: Path) -> None:
    assert "loading second" in call(live, "load", f"second={directory}", "--no-wait").stdout
    until(lambda: live.engine.model("second").state == "ready")
    assert call(live, "unload", "second", "--no-drain", "--no-wait").exit_code == 0
    until(lambda: "second" not in names(live))


def test_what_the_server_refuses_is_told(live: LiveDeployment, directory: Path) -> None:
    for arguments, message in (
        (("load", f"first={directory}"), "the name 'first' is taken"),
        (("load", "/no/such/model"), "no such directory"),
        (("unload", "nobody"), "the model 'nobody' is not served here"),
        (("load", "/"), "write NAME=/"),
    ):
        refused = call(live, *arguments)
        assert isinstance(refused.exception, CrossPoolError)
        assert message in str(refused.exception)
    assert "admin API key" in str(call(live, "unload", "first", key="wrong").exception)
    assert names(live) == ["first"]


def test_a_load_that_fails_says_why_and_the_name_is_free_again(
    live: LiveDeployment, directory: Path, tmp_path: Path
) -> None:
    cut = shutil.copytree(directory, tmp_path / "cut")
    (weights,) = cut.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    failed = call(live, "load", str(cut))
    assert isinstance(failed.exception, CrossPoolError)
    assert "incomplete download" in str(failed.exception)
    assert "\n" not in str(failed.exception)
    shutil.copytree(directory, cut, dirs_exist_ok=True)
    again = call(live, "load", str(cut))
    assert again.exit_code == 0, again.exception
    assert call(live, "unload", "cut").exit_code == 0


class ScriptedClient:
    """A server whose one model goes through `states`, one at a look; None: the model is not there."""

    def __init__(self, *states: str | None) -> None:
        self.states, self.posted = list(states), []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.posted.append((path, body))
        return {"name": "a/b"}

    def get(self, path: str) -> dict[str, Any]:
        state = self.states.pop(0)
        sizes = {"loaded_bytes": 1, "total_bytes": 2, "bytes_by_rank": {"w0": 2}, "load_s": 1.0, "context_limit": 9}
        row = {"name": "a/b", "state": state, "num_running": 1, "num_queued": 0, "error": None, **sizes}
        return {"data": [] if state is None else [row]}


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(models, "POLL_S", 0)
    return Console(file=io.StringIO())


def test_commands_wait_until_the_model_is_there_or_gone(console: Console) -> None:
    client: Any = ScriptedClient("loading", "loading", "ready")
    models.load(client, "a/b", {"aliases": None, "revision": "main"}, waits=True, console=console)
    assert client.states == []
    assert client.posted == [("/admin/models/a/b/load", {"path": "a/b", "wait": False, "revision": "main"})]
    client = ScriptedClient("draining", "draining", None)
    models.unload(client, "a/b", drains=False, waits=True, console=console)
    assert client.states == []
    assert client.posted == [("/admin/models/a/b/unload", {"drain": False, "wait": False})]


@pytest.mark.parametrize(
    ("end", "reason"), [("failed", "it is failed"), (None, "it was unloaded meanwhile"), ("draining", "it is draining")]
)
def test_a_model_that_is_not_ready_in_the_end_is_an_error(end: str | None, reason: str, console: Console) -> None:
    client: Any = ScriptedClient("loading", end)
    with pytest.raises(CrossPoolError, match=f"a/b was not loaded: {reason}"):
        models.load(client, "a/b", {}, waits=True, console=console)
