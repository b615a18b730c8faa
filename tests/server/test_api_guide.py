"""The examples of docs/guides/api.md, README.md and docs/guides/serving.md do what they say."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import httpx2
import pytest
import yaml

from crosspool.deployment.load import load_deployment
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import live_server
from tests.support.server_fixtures import fake_app

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "docs" / "guides" / "api.md"
PAGES = [*sorted(GUIDE.parent.glob("api*.md")), ROOT / "README.md"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = FakeEngine(("austen", "shakespeare", "holmes"))
    with live_server(fake_app(engine, tmp_path_factory.mktemp("models"))) as address:
        yield address


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_curl_examples(page: Path, url: str) -> None:
    found = [
        match
        for block in blocks(page, "sh")
        for match in re.finditer(r"curl http://localhost:8000(\S+) .*?-d '(\{.*?\})'$", block, re.DOTALL | re.MULTILINE)
    ]
    assert found
    for match in found:
        response = httpx2.post(url + match[1], json=json.loads(match[2]))
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_examples(page: Path, url: str) -> None:
    examples = blocks(page, "python")
    assert examples
    for example in examples:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(example.replace("http://localhost:8000", url), page.name, "exec"), {"__name__": "example"})
        assert "One two three" in printed.getvalue()


def test_every_error_code_is_in_the_guide() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src/crosspool/server").glob("*.py"))
    codes = set(re.findall(r'code="([a-z_]+)"', source)) - {"engine_error", "internal_error"}
    guide = GUIDE.read_text()
    assert [code for code in sorted(codes) if f"`{code}`" not in guide] == []


def test_the_yaml_example_is_a_deployment(tmp_path: Path) -> None:
    (example,) = blocks(ROOT / "docs" / "guides" / "serving.md", "yaml")
    assert yaml.safe_load(example)
    path = tmp_path / "deployment.yaml"
    path.write_text(example)
    config = load_deployment({}, config_file=path)
    assert [model.served_name for model in config.models] == ["qwen3", "glm-4.7-flash"]
