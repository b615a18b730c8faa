"""As many open files as the system allows."""

from __future__ import annotations

import resource

import pytest

from crosspool.server.open_files import raise_limit


def test_the_limit_becomes_what_the_administrator_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append((which, limits)))
    raise_limit()
    assert asked == [(resource.RLIMIT_NOFILE, (4096, 4096))]


def test_a_limit_that_stays_keeps_nothing_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_limit()
