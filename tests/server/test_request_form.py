"""HEAD and slashes at the end of a path: what clients and proxies write otherwise than our routes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from crosspool.server.app import create_app
from crosspool.server.catalogue import Catalogue
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import live_server
from tests.support.server_fixtures import tiny_frontend

MakeHTTP = Callable[..., httpx2.AsyncClient]


@pytest.mark.parametrize(
    "path",
    ["/health", "/health/ready", "/health/models/tiny", "/v1/models", "/metrics", "/stats", "/ui/", "/openapi.json"],
)
async def test_head_is_get_without_its_body(http: httpx2.AsyncClient, path: str) -> None:
    head, got = await http.head(path), await http.get(path)
    assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


async def test_head_of_a_route_that_only_takes_a_body_is_refused(http: httpx2.AsyncClient) -> None:
    assert (await http.head("/v1/completions")).status_code == 405


def test_head_of_a_stream_ends_and_leaves_the_connection_usable(tmp_path: Path) -> None:
    app = create_app(FakeEngine(("tiny",)), Catalogue([tiny_frontend(tmp_path / "tiny")]))
    with live_server(app) as url, httpx2.Client(base_url=url, timeout=10) as client:
        assert client.head("/stats/stream").status_code == 200
        assert client.get("/version").status_code == 200


async def test_a_slash_at_the_end_of_a_path_changes_nothing(http: httpx2.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
    assert (await http.post("/v1/completions/", json=body)).status_code == 200
    assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()
    assert (await http.get("/health//")).status_code == 200
    assert (await http.get("/v1/models/nope/")).status_code == 404


async def test_a_slash_opens_no_guarded_route(http_with: MakeHTTP) -> None:
    async with http_with(api_keys=("one",), admin_api_keys=("boss",)) as http:
        for path in ("/v1/models/", "/stats/", "/admin/limits/"):
            response = await http.get(path, headers={"Authorization": "Bearer one"} if "admin" in path else {})
            assert response.status_code == 401, path
