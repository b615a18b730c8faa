"""`crosspool collect-env` and shell completion."""

from __future__ import annotations

import json
import platform

import pytest
from typer.testing import CliRunner

from crosspool import __version__, cli
from crosspool.commands import collect_env


def test_it_tells_versions_and_nothing_that_names_someone() -> None:
    shown = CliRunner().invoke(cli.app, ["collect-env", "--json"])
    facts = json.loads(shown.stdout)
    assert facts["crosspool"] == __version__
    assert facts["python"] == platform.python_version()
    assert platform.node() not in shown.stdout or len(platform.node()) < 3
    lines = CliRunner().invoke(cli.app, ["collect-env"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(facts)


def test_a_gpu_query_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "GPU_QUERY", ("false",))
    assert collect_env.environment()["gpus"] == "nvidia-smi failed: CalledProcessError"


def test_completion_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_CROSSPOOL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "crosspool coll")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert CliRunner().invoke(cli.app, [], prog_name="crosspool").stdout.strip() == "collect-env"
