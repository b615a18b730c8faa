"""Reading queue times of servers of any kind."""

from __future__ import annotations

import io
import logging

import pytest

from crosspool.bench import server


@pytest.mark.parametrize("body", [b'{"data": [{"id": "m"}]}', b"<html><body class='x'>no</body></html>"])
def test_a_page_of_another_kind_costs_queue_times_and_not_the_run(body, monkeypatch, caplog):
    monkeypatch.setattr(server.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(body))
    with caplog.at_level(logging.WARNING):
        assert server.read_queues(["http://x/v1"], None) == {}
    assert "http://x/metrics is no page of metrics" in caplog.text
