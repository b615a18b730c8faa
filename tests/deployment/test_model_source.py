"""A Hugging Face id: fetched once with a progress bar, then served from the cache, and refused in one line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosspool.demo.scenario import demo_model_dirs
from crosspool.deployment.model_source import is_hub_id, model_directory
from crosspool.errors import CheckpointError
from tests.support.fake_hub import fake_hub
from tests.support.tiny_models import tiny_config


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    austen = demo_model_dirs()["austen"]
    quantised, adapter = tmp_path / "quantised", tmp_path / "adapter"
    config = tiny_config("qwen3_moe", quantization_config={"quant_method": "fp8"})
    for directory in (quantised, adapter):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes(1000))
    (quantised / "config.json").write_text(json.dumps(config))
    (adapter / "adapter_config.json").write_text("{}")
    repositories = {"acme/austen": austen, "acme/gated": austen, "acme/fp8": quantised, "acme/adapter": adapter}
    with fake_hub(repositories, gated=frozenset({"acme/gated"})) as endpoint:
        yield endpoint


def _generate(repository: str, home: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    prompts = home / "prompts.txt"
    prompts.write_text("Once upon a time\n")
    command = [sys.executable, "-m", "crosspool", "generate", repository, "--prompts", str(prompts)]
    env = {**os.environ, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0", **environment}
    return subprocess.run(
        [*command, "--max-tokens", "4", "--temperature", "0"], env=env, capture_output=True, text=True, timeout=120
    )


def test_an_id_is_fetched_with_a_bar_and_then_served_without_a_network(hub: str, tmp_path: Path) -> None:
    fetched = _generate("acme/austen", tmp_path, HF_ENDPOINT=hub)
    assert fetched.returncode == 0, fetched.stderr
    assert "Fetching" in fetched.stderr
    assert "100%" in fetched.stderr
    cached = _generate("acme/austen", tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert cached.returncode == 0, cached.stderr
    assert cached.stdout == fetched.stdout


@pytest.mark.parametrize(
    ("repository", "said"),
    [
        ("acme/gated", "HF_TOKEN"),
        ("acme/none", "neither a directory"),
        ("acme/fp8", "config.json: quantization_config asks for 'fp8'"),
        ("acme/adapter", "config.json: no such file; a model directory holds config.json and its weights"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: str, tmp_path: Path, repository: str, said: str) -> None:
    refused = _generate(repository, tmp_path, HF_ENDPOINT=hub)
    assert refused.returncode == 1
    assert said in refused.stderr, refused.stderr
    assert repository in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "hf").rglob("*.safetensors"))  # seen before any weights came


def test_an_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    refused = _generate("acme/austen", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert refused.returncode == 1
    assert "check the network" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


def test_a_demo_model_is_found_by_name_unless_a_directory_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_directory("austen") == demo_model_dirs()["austen"]
    (tmp_path / "austen").mkdir()
    assert model_directory("austen") == Path("austen")
    for unknown in ("melville", "../models"):
        with pytest.raises(CheckpointError, match="no such directory"):
            model_directory(unknown)


def test_a_directory_is_never_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "austen").mkdir(parents=True)
    assert not is_hub_id("acme/austen")
    assert is_hub_id("acme/holmes")
