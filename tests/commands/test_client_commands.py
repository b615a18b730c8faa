"""`crosspool chat`, `ps` and `top` against a server, and what they say when there is none."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from crosspool import cli
from crosspool.commands import chat
from crosspool.commands.top import view
from crosspool.errors import CrossPoolError
from tests.support.fake_engine import FakeEngine, Script
from tests.support.live_server import live_server
from tests.support.server_fixtures import fake_app


@pytest.fixture(scope="module")
def scripted() -> FakeEngine:
    return FakeEngine(("tiny", "other"))


@pytest.fixture(scope="module")
def url(scripted: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("models")
    with live_server(fake_app(scripted, directory, api_keys=("k",))) as address:
        yield address


def call(url: str, *arguments: str, stdin: str = "", key: str = "k") -> Result:
    return CliRunner().invoke(cli.app, [*arguments, "--base-url", url, "--api-key", key], input=stdin)


def test_ps_lists_models(url: str) -> None:
    shown = call(url, "ps").stdout
    assert "tiny" in shown
    assert "ready" in shown
    assert "300 B" in shown  # weights
    assert "16.0 KiB" in shown  # 4 frames used
    cards = json.loads(call(url, "ps", "--json").stdout)
    assert [card["id"] for card in cards] == ["tiny", "other"]


def test_ps_and_top_say_which_models_miss_a_rank(url: str, scripted: FakeEngine) -> None:
    scripted.ranks_down = {"w0": 1.0}
    try:
        for command in ("ps", "top"):
            rows = [line for line in call(url, command).stdout.splitlines() if line.startswith(("tiny", "other"))]
            assert [row.split()[1] for row in rows] == ["recovering", "recovering"]
    finally:
        scripted.ranks_down = {}


def test_top_shows_both_pools_and_the_lanes(url: str) -> None:
    shown = call(url, "top").stdout  # once, since no terminal looks on
    assert shown == call(url, "top", "--once").stdout
    for part in ("CrossPool", "idle", "KV kv0", "weights", "48.0 KiB of 400.0 KiB", "LANE", "tiny"):
        assert part in shown, part
    assert json.loads(call(url, "top", "--json").stdout)["pools"][0]["frames_budget"] == 100


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_cut_in_a_narrow_terminal(url: str, width: int) -> None:
    stats = json.loads(call(url, "top", "--json").stdout)
    stats["tbt_s"] = {"tiny": {"p50": 0.1389, "p99": 1.9212}, "other": {"p50": 0.0034, "p99": 0.0999}}
    console = Console(width=width, file=io.StringIO())
    console.print(view(stats, width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert any(line.startswith("KV kv0") and line.rstrip().endswith("48.0 KiB of 400.0 KiB") for line in lines)
    assert any(line.startswith("tiny") and line.rstrip().endswith("139/1921 ms") for line in lines)


def test_chat_keeps_the_conversation(url: str, scripted: FakeEngine) -> None:
    scripted.requests.clear()
    result = call(
        url,
        "chat",
        "tiny",
        "--system",
        "Be brief.",
        "--max-tokens",
        "2",
        stdin="hello\n\nand?\n/reset\nnew\n/exit\nno\n",
    )
    assert result.stdout.splitlines() == ["One two"] * 3
    lengths = [len(request.prompt_token_ids) for request in scripted.requests]
    assert lengths[0] < lengths[1]
    assert lengths[2] < lengths[1]
    assert {request.sampling.max_tokens for request in scripted.requests} == {2}


def test_quick_chat_and_the_choice_of_a_model(url: str) -> None:
    assert call(url, "chat", "other", "-q", "hi", "--max-tokens", "3").stdout == "One two three\n"
    unnamed = call(url, "chat", "-q", "hi")
    assert isinstance(unnamed.exception, CrossPoolError)
    assert "tiny, other" in str(unnamed.exception)


def test_failures_are_told(url: str, scripted: FakeEngine) -> None:
    refused = str(call(url, "ps", key="wrong").exception)
    assert "HTTP 401" in refused
    assert "give one with --api-key" in refused
    assert "no server answers" in str(call("http://127.0.0.1:9", "top", "--once").exception)
    assert "no server answers" in str(call("HTTP://127.0.0.1:9", "ps").exception)
    for wrong in ("localhost:8000", "ftp://localhost"):
        assert str(call(wrong, "ps").exception) == f"{wrong} is no base URL; one begins with http:// or https://"
    assert "model 'nope' is not served" in str(call(url, "chat", "nope", "-q", "hi").exception)
    scripted.scripts["tiny"] = Script(fail_after=2)
    assert "the step failed" in str(call(url, "chat", "tiny", "-q", "hi").exception)
    scripted.scripts["tiny"] = Script()


def test_ctrl_c_stops_the_answer_and_the_talk_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[dict[str, str]]] = []

    class Client:
        def post_events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            asked.append([dict(message) for message in body["messages"]])
            yield {"choices": [{"delta": {"content": "One"}}]}
            if len(asked) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n"))
    chat.run(Client(), "tiny", quick=None, system=None, options={})  # type: ignore[arg-type]
    assert [[message["content"] for message in messages] for messages in asked] == [["first"], ["second"]]
    assert capsys.readouterr().out == "One\nOne\n"
