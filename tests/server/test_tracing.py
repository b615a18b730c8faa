"""One span for each request, with what is known of it and nothing of what was said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from crosspool.errors import CrossPoolError
from crosspool.server import tracing
from tests.support.fake_engine import FakeEngine, Script
from tests.support.server_fixtures import connect, fake_app


async def test_a_span_joins_the_clients_trace_and_names_route_id_key_and_model(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr("crosspool.server.app.make_provider", lambda endpoint: provider)
    app = fake_app(engine, tmp_path, api_keys=("k",), otlp_traces_endpoint="http://collector.example/v1/traces")
    engine.scripts["other"] = Script(fail_after=0)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"Authorization": "Bearer k", "X-Request-Id": "mine", "traceparent": parent}
    async with connect(app) as http:
        http.headers.update(headers)
        for model in ("nickname", "other"):
            await http.post("/v1/completions", json={"model": model, "prompt": "a secret", "max_tokens": 2})
        await http.get("/health")
        await http.get("/no/such/route")
    good, bad, unknown = kept.get_finished_spans()
    assert good.name == "POST /v1/completions"
    assert good.context.trace_id == int(parent.split("-")[1], 16)
    found: dict[str, Any] = dict(good.attributes)
    assert found == {
        "http.route": "/v1/completions",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "crosspool.request_id": "mine",
        "crosspool.key": "key1",
        "gen_ai.request.model": "tiny",
    }
    assert bad.attributes["http.response.status_code"] == 500
    assert not bad.status.is_ok
    assert unknown.name == "GET"


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(CrossPoolError, match=r"install crosspool\[otel\]"):
        tracing.make_provider("http://collector.example/v1/traces")
