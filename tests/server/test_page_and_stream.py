"""The page's files, and /stats/stream, which feeds it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx2

from crosspool.engine.step_log import StepSpan
from crosspool.errors import ShuttingDownError
from crosspool.server.ui_routes import DIRECTORY, FILES
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import live_server
from tests.support.server_fixtures import connect, fake_app

SPANS = [StepSpan(0, "decode", "tiny", 4, 1e12 + index, 1e12 + index + 0.5, 0.125, 0.25) for index in range(3)]


async def test_every_file_of_the_page_is_served_open_and_names_no_other_host(
    http_with: Callable[..., httpx2.AsyncClient],
) -> None:
    async with http_with(api_keys=("k",)) as http:
        for name, path in {"": DIRECTORY / "index.html", **FILES}.items():
            response = await http.get(f"/ui/{name}")
            assert (response.status_code, response.content) == (200, path.read_bytes())
            assert "default-src 'self'" in response.headers["content-security-policy"]
            if not name.startswith("vendor/"):
                assert set(re.findall(rb"https?://([\w.]+)", response.content)) <= {b"www.w3.org"}, name
        assert (await http.get("/ui/../app.py")).status_code in (401, 404)
        assert (await http.get("/ui/%2e%2e/app.py")).status_code == 404
        assert (await http.get("/stats/stream")).status_code == 401


async def test_what_the_modules_import_exists() -> None:
    for name, path in FILES.items():
        if name.endswith(".js") and not name.startswith("vendor/"):
            for target in re.findall(r'from "\./([^"]+)"', path.read_text()):
                assert target in FILES, (name, target)


async def test_the_document_of_routes_knows_no_status_that_is_never_answered(http: httpx2.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    statuses = {
        status for methods in document["paths"].values() for route in methods.values() for status in route["responses"]
    }
    assert "422" not in statuses
    assert {"200", "400", "401", "404", "429", "503"} <= statuses
    assert "HTTPValidationError" not in json.dumps(document)
    assert (await http.post("/v1/completions", json={"model": "tiny", "prompt": 5})).status_code == 400


async def test_the_root_leads_to_the_page_behind_a_prefix_too(engine: FakeEngine, tmp_path: Path) -> None:
    async with connect(fake_app(engine, tmp_path, api_keys=("k",)), root_path="/llm") as http:
        for path, place in (("/llm/", ""), ("/llm/ui", ""), ("/llm/docs", "routes.html")):
            response = await http.get(path)
            assert (response.status_code, response.headers["location"]) == (307, f"/llm/ui/{place}")
        assert "routes.html" in FILES


async def test_the_stream_tells_each_step_once_and_ends_with_the_engine(engine: FakeEngine, tmp_path: Path) -> None:
    engine.steps = SPANS[:2]
    moments = []
    with live_server(fake_app(engine, tmp_path)) as url:
        async with httpx2.AsyncClient(base_url=url) as http:
            async with asyncio.timeout(20), http.stream("GET", "/stats/stream", params={"interval": 0.2}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        moments.append(json.loads(line[6:]))
                        if not moments[-1]["steps"] and engine.steps is SPANS:
                            engine.failure = ShuttingDownError("it ended")  # so that the stream ends by itself
                        engine.steps = SPANS
            engine.failure = None
            assert (await http.get("/stats/stream", params={"interval": 0})).status_code == 400
    steps = [moment["steps"] for moment in moments]
    assert [len(found) for found in steps if found] == [2, 1]
    assert steps[0][0] == [0, "decode", "tiny", 4, 1e12, 1e12 + 0.5, 0.125, 0.25, None]
    assert moments[0]["model_health"] == {"tiny": {"status": "idle"}, "other": {"status": "idle"}}
