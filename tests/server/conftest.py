"""Fixtures of the server's tests: a scripted engine, and HTTP to the application in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.server_fixtures import connect, fake_app


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(("tiny", "other"))


@pytest.fixture
async def http(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the whole application over `engine`."""
    async with connect(fake_app(engine, tmp_path)) as client:
        yield client


@pytest.fixture
def http_with(engine: FakeEngine, tmp_path: Path) -> Callable[..., httpx2.AsyncClient]:
    """A client of an application with server settings of the test's own."""

    def make(**settings: Any) -> httpx2.AsyncClient:
        return connect(fake_app(engine, tmp_path, **settings))

    return make
