"""`crosspool serve --check`: tells what would be served, or what is wrong, and starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from crosspool import cli
from crosspool.errors import CrossPoolError
from tests.support.tiny_models import write_tiny_model


def check(*arguments: str) -> tuple[str, BaseException | None]:
    found = CliRunner().invoke(cli.app, ["serve", "--check", *arguments])
    return found.output, found.exception


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "P", "qwen3_moe", num_layers=2, max_position_embeddings=512)


def test_a_sound_deployment_is_told_and_not_started(model: Path) -> None:
    before = {*threading.enumerate(), *psutil.Process().children()}
    output, error = check(str(model), "--weights-ranks", "2", "--kv-pool-bytes", "16MiB")
    assert error is None
    assert "P: " in output
    assert "context 512 tokens" in output
    assert "FFNs on w0, w1" in output
    assert {*threading.enumerate(), *psutil.Process().children()} <= before


def test_where_logs_are_json_every_line_is(model: Path) -> None:
    command = [sys.executable, "-m", "crosspool", "serve", "--check", str(model), "--kv-pool-bytes", "16MiB"]
    ended = subprocess.run(
        [*command, "--log-format", "json"], capture_output=True, text=True, env=os.environ, timeout=100
    )
    assert ended.returncode == 0
    messages = [json.loads(line)["message"] for line in ended.stderr.splitlines()]
    assert messages[-1] == "settings, model files and the KV pool are in order; nothing was started"


def test_weights_that_are_cut_are_found_though_none_is_loaded(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    _, error = check(str(model))
    assert isinstance(error, CrossPoolError)
    assert "model P: " in str(error)
    assert "incomplete download?" in str(error)


def test_floors_of_all_models_are_added_up(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    entry = f"{{path: {model}, kv_floor: 9MiB, name: "
    path.write_text(f"kv_pool_bytes: 16MiB\nframe_bytes: 64KiB\nmodels: [{entry}a}}, {entry}b}}]\n")
    _, error = check("--config", str(path))
    assert "the floors add up to 18.0 MiB" in str(error)
    path.write_text(path.read_text().replace("16MiB", "32MiB"))
    assert check("--config", str(path))[1] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv-pool-bytes", "900GiB"), "kv_pool_bytes is 900.0 GiB"),
        (("--ssl-certfile", "no.pem", "--ssl-keyfile", "no.pem"), "cannot serve HTTPS"),
        (("--weights-ranks", "99"), "use at most 3 weights ranks"),
    ],
)
def test_what_this_machine_or_the_models_cannot_is_found(model: Path, arguments: tuple[str, ...], message: str) -> None:
    _, error = check(str(model), *arguments)
    assert isinstance(error, CrossPoolError)
    assert message in str(error)
