"""`make soak`: SOAK_MINUTES (30) of mixed traffic leave memory flat and nothing open. SOAK_JSON keeps the figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.served.soak import run_soak
from benchmarks.served.soak_requests import LEFT

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
MAX_GROWTH_PERCENT = 2.0
MAX_THREADS = 8
"""Of pools that grow to their bound as they are used: texts, names, files."""


@pytest.mark.soak
def test_mixed_traffic_leaves_memory_flat_and_nothing_open() -> None:
    result = run_soak(MINUTES)
    if kept := os.environ.get("SOAK_JSON"):
        Path(kept).write_text(json.dumps(result.figures(), indent=2) + "\n")
    growth = result.growth_percent()
    print(f"\n{MINUTES:g} minutes: {dict(result.statuses)}; growth in percent by process: {growth}")
    assert result.statuses[200] > 10 * MINUTES
    assert result.statuses[LEFT] > 0
    assert set(result.statuses) <= {200, 400, 404, 413, 429, 501, LEFT}
    assert (result.frames_left, result.sequences_left) == (0, 0)
    assert result.sockets_left == 0
    assert result.tasks_left <= 0
    assert result.unaccounted == 0
    assert result.threads_grown <= MAX_THREADS
    assert result.files_grown <= 0
    assert max(growth.values()) < MAX_GROWTH_PERCENT, growth
    assert result.exit_code == 0, result.log[-3000:]
    assert "Traceback" not in result.log, result.log[-3000:]
