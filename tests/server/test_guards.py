"""Keys, request ids, body sizes, CORS and the access log."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx2
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.live_server import live_server
from tests.support.server_fixtures import connect, fake_app

PROMPT = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
MakeHTTP = Callable[..., httpx2.AsyncClient]


async def test_a_key_guards_everything_but_health(http_with: MakeHTTP) -> None:
    async with http_with(api_keys=("one", "two")) as http:
        for path in (
            "/v1/models",
            "/v1/models/tiny",
            "/metrics",
            "/stats",
            "/version",
            "/openapi.json",
            "/redoc",
            "/x",
        ):
            response = await http.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await http.post("/v1/completions", json=PROMPT)).status_code == 401
        for path in ("/health", "/health/ready"):
            assert (await http.get(path)).status_code == 200
        for header in ("Bearer one", "bearer two"):
            assert (await http.get("/v1/models", headers={"Authorization": header})).status_code == 200
        for header in ("Bearer three", "Bearer", "Basic one", "one", "Bearer one two", "Bearer "):
            assert (await http.get("/v1/models", headers={"Authorization": header})).status_code == 401


async def test_health_stays_open_behind_a_root_path(engine: FakeEngine, tmp_path: Path) -> None:
    """As under uvicorn's root_path, where the path holds the prefix that the proxy stripped."""
    async with connect(fake_app(engine, tmp_path, api_keys=("one",)), root_path="/llm") as http:
        assert (await http.get("/llm/health")).status_code == 200
        assert (await http.get("/llm/v1/models")).status_code == 401
        assert (await http.get("/llm/v1/models", headers={"Authorization": "Bearer one"})).status_code == 200


async def test_no_target_reaches_an_admin_route_past_the_guard(engine: FakeEngine, tmp_path: Path) -> None:
    """With root_path /a, `GET dmin/limits` (no slash) has the path /admin/limits, which the router knows whole."""
    for root_path in ("/a", "/adm", "/"):
        async with connect(fake_app(engine, tmp_path), root_path=root_path) as http:
            assert (await http.get("/admin/limits")).status_code == 404, root_path
    async with connect(fake_app(engine, tmp_path), root_path="/a") as http:
        assert (await http.get("/a/admin/limits")).status_code == 403


async def test_request_ids_are_echoed_or_made(http: httpx2.AsyncClient) -> None:
    response = await http.get("/version", headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    made = [(await http.get("/version")).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    for bad in ("x" * 129, "two words"):
        assert (await http.get("/version", headers={"X-Request-Id": bad})).headers["x-request-id"].startswith("req-")
    assert (await http.get("/nope", headers={"X-Request-Id": "mine-2"})).headers["x-request-id"] == "mine-2"


async def test_large_bodies_are_refused_by_length_and_while_they_arrive(http_with: MakeHTTP) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1000

    async with http_with(max_body_bytes=10_000) as http:
        declared = await http.post("/v1/completions", content=b" " * 10_001)
        arriving = await http.post("/v1/completions", content=chunks())
        for response in (declared, arriving):
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
            assert "10000" in response.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={**PROMPT, "user": "x" * 9000})).status_code == 200


def test_a_client_that_sends_all_of_a_large_body_sees_why_it_is_refused(tmp_path: Path) -> None:
    body = b" " * 20_000_000  # more than any socket buffers
    app = fake_app(FakeEngine(), tmp_path, max_body_bytes=10_000)
    with live_server(app) as url, closing(HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
        for content, headers in ((body, {}), (iter([body[:9_000], body]), {"Transfer-Encoding": "chunked"})):
            connection.request("POST", "/v1/completions", content, headers, encode_chunked=bool(headers))
            response = connection.getresponse()
            assert (response.status, json.load(response)["error"]["code"]) == (413, "request_too_large")
            assert response.getheader("connection") == "close"


async def test_a_path_that_nearly_is_a_route_is_told_which(http: httpx2.AsyncClient) -> None:
    for path, meant in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completion", "/v1/chat/completions"),
    ):
        response = await http.post(path, json={})
        assert response.status_code == 404
        assert f"did you mean {meant}?" in response.json()["error"]["message"]
    assert "GET /openapi.json lists them" in (await http.get("/api/generate")).text


async def test_cors_is_off_unless_origins_are_named(http: httpx2.AsyncClient, http_with: MakeHTTP) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in (await http.get("/version", headers=headers)).headers
    async with http_with(allowed_origins=("https://page.example",), api_keys=("k",)) as allowed:
        preflight = await allowed.options("/v1/completions", headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        assert (await allowed.options("/v1/completions")).status_code == 401  # no preflight: a request as any other
        other = await allowed.options("/v1/completions", headers={**headers, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_unknown_routes_and_methods_have_the_error_shape(http: httpx2.AsyncClient) -> None:
    missing, wrong = await http.get("/v1/nope"), await http.get("/v1/completions")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.json()["error"]["message"] == "/v1/completions takes POST, not GET"
    assert wrong.headers["allow"] == "POST"


async def test_a_bug_is_a_500_that_keeps_its_text_to_the_log(
    http: httpx2.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(engine, "generate", broken)
    response = await http.post("/v1/completions", json=PROMPT)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert "secret" in caplog.text


async def test_paths_are_quiet_behind_a_root_path_too(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="crosspool.access")
    async with connect(fake_app(engine, tmp_path), root_path="/llm") as http:
        await http.get("/llm/health")
        await http.get("/llm/version")
    lines = [record.getMessage() for record in caplog.records if record.name == "crosspool.access"]
    assert [line.split()[1] for line in lines] == ["/llm/version"]


async def test_the_access_log_has_one_line_for_a_request(http_with: MakeHTTP, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="crosspool.access")
    async with http_with(quiet_paths=("/health",)) as http:
        await http.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "r1"})
        await http.get("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "crosspool.access"]
    assert len(lines) == 1
    assert lines[0].startswith("POST /v1/completions 200 ")
    assert "id=r1 model=tiny" in lines[0]
