"""Directories that hold no model: each is told in one line, whichever of its files is to blame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from crosspool.config import DeploymentConfig, ModelConfig
from crosspool.deployment.prepared_model import demo_models, prepare_model
from crosspool.errors import CheckpointError
from tests.support.tiny_models import write_tiny_model


def _replaced(name: str) -> Callable[[Path], None]:
    def replace(home: Path) -> None:
        (home / name).unlink(missing_ok=True)
        (home / name).mkdir()

    return replace


def _turns_in_a_circle(home: Path) -> None:
    (home / "config.json").unlink()
    (home / "config.json").symlink_to(home / "config.json")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (_replaced("config.json"), "Is a directory"),
        (_replaced("tokenizer.json"), "Is a directory"),
        (_replaced("tokenizer_config.json"), "Is a directory"),
        (_replaced("generation_config.json"), "Is a directory"),
        (_turns_in_a_circle, "Too many levels of symbolic links"),
        (lambda home: (home / "config.json").write_text("[" * 100_000), "recursion"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_one_line(
    tmp_path: Path, harm: Callable[[Path], object], told: str
) -> None:
    home = write_tiny_model(tmp_path / "m", "qwen3_moe", num_layers=1)
    harm(home)
    _check_told(str(home), told)


def test_a_name_too_long_for_the_system_is_told_in_one_line() -> None:
    _check_told("a" * 300, "File name too long")


def _check_told(source: str, told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as caught:
        prepare_model(ModelConfig(source=source, name="m"), DeploymentConfig(models=demo_models()))
    assert str(caught.value).startswith("model m: ")
    assert "\n" not in str(caught.value)
