"""Streams of a process: few, since those that share a queue of the device wait for each other."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import crosspool.backends.cuda  # noqa: E402
from crosspool.backends.cuda.device import queues  # noqa: E402
from tests.backends.cuda.fake_driver import put_in_place  # noqa: E402

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


def test_a_thread_without_a_context_makes_streams_and_stays_as_it_was(monkeypatch):
    """As the driver has it: a stream belongs to the context that is the thread's current one."""
    current = []

    def create(flags, priority):
        assert current, "CUDA_ERROR_INVALID_CONTEXT"
        return ((current[-1], flags, priority),)

    calls = {
        "cuInit": lambda flags: (),
        "cuDeviceGet": lambda index: (index,),
        "cuDevicePrimaryCtxRetain": lambda index: (f"primary of {index}",),
        "cuCtxPushCurrent": lambda context: (current.append(context), ())[1],
        "cuCtxPopCurrent": lambda: (current.pop(),),
        "cuStreamCreateWithPriority": create,
    }
    put_in_place(monkeypatch, calls, CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING="non-blocking"))
    made = []
    monkeypatch.setattr(queues, "int", lambda handle: handle, raising=False)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: made.append((handle, device)))
    queues.own_stream(torch.device("cuda", 1), -1)
    assert made == [(("primary of 1", "non-blocking", -1), torch.device("cuda", 1))]
    assert current == []


def test_no_rank_has_torch_make_streams():
    """With the first one it makes 32 of each priority, which is more than the device has queues."""
    root = Path(crosspool.backends.cuda.__file__).parent
    found = [
        str(path.relative_to(root)) for path in root.rglob("*.py") if re.search(r"cuda\.Stream\(", path.read_text())
    ]
    assert found == []
