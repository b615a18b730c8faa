"""The models that engine tests serve, and the same undivided."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine_deployment import load_undivided, write_models
from tests.support.monolithic import MonolithicModel


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def undivided(directories: dict[str, Path]) -> dict[str, MonolithicModel]:
    return load_undivided(directories)
