"""JSON log lines carry what is known of the request they were written for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import httpx2
import pytest

from crosspool.server.context import json_formatter


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(json_formatter())
        self.found: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(json.loads(self.format(record)))


async def test_a_line_has_id_key_and_model(http_with: Callable[..., httpx2.AsyncClient]) -> None:
    lines, logger = Lines(), logging.getLogger("crosspool")
    logger.addHandler(lines)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        async with http_with(api_keys=("secret",), quiet_paths=()) as http:
            body = {"model": "nickname", "prompt": "hi", "max_tokens": 2, "unheard_of": 1}
            headers = {"X-Request-Id": "mine", "Authorization": "Bearer secret"}
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    logger.warning("outside")
    access = lines.found[-1]
    assert access["logger"] == "crosspool.access"
    assert {name: access[name] for name in ("request_id", "key", "model", "method", "path", "status", "level")} == {
        "request_id": "mine",
        "key": "key1",
        "model": "tiny",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "level": "info",
    }
    assert access["duration_ms"] >= 0
    assert all(line["request_id"] == "mine" for line in lines.found)
    assert "secret" not in json.dumps(lines.found)


def test_an_exception_is_one_field() -> None:
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        record = logging.getLogger("x").makeRecord("x", 40, "f", 1, "it failed: %s", ("why",), exc_info=_info())
    line = json_formatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == "it failed: why"
    assert "ValueError: bad" in found["exception"]
    assert "request_id" not in found


def _info() -> pytest.ExceptionInfo[BaseException]:
    import sys

    return sys.exc_info()  # type: ignore[return-value]
