"""Streams of a process: few, since those that share a queue of the device wait for each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import crosspool.backends.cuda  # noqa: E402
from crosspool.backends.cuda.device import queues  # noqa: E402

pytestmark = pytest.mark.judge

GPU = torch.device("cuda", 0)


def test_ranks_of_a_process_share_the_stream_of_a_purpose(monkeypatch):
    monkeypatch.setattr(queues, "own_stream", lambda device, priority=0: (device, priority))
    queues.stream_for.cache_clear()
    try:
        loads, captures = queues.stream_for("loads", GPU), queues.stream_for("captures", GPU)
        assert queues.stream_for("loads", GPU) is loads
        assert queues.stream_for("loads", torch.device("cuda", 1)) is not loads
        assert queues.stream_for("zeros", GPU) is not loads, "a load would hold up channels that open"
        assert captures == (GPU, queues.DECODE_STREAM_PRIORITY), "graphs keep the priority"
    finally:
        queues.stream_for.cache_clear()


def test_no_rank_has_torch_make_streams():
    """With the first one it makes 32 of each priority, which is more than the device has queues."""
    root = Path(crosspool.backends.cuda.__file__).parent
    found = [
        str(path.relative_to(root)) for path in root.rglob("*.py") if re.search(r"cuda\.Stream\(", path.read_text())
    ]
    assert found == []
