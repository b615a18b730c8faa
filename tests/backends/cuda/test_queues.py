"""Streams of a process: few, since those that share a queue of the device wait for each other."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def test_a_thread_without_a_context_makes_streams_and_stays_as_it_was(monkeypatch):
    """As the driver has it: a stream belongs to the context that is the thread's current one."""
    current = []

    def create(flags, priority):
        assert current, "CUDA_ERROR_INVALID_CONTEXT"
        return (success, (current[-1], priority))

    success = object()
    fake = ModuleType("cuda.bindings.driver")
    fake.CUresult, fake.CUstream_flags = (
        SimpleNamespace(CUDA_SUCCESS=success),
        SimpleNamespace(CU_STREAM_NON_BLOCKING=1),
    )
    fake.cuInit, fake.cuDeviceGet = lambda flags: (success,), lambda index: (success, index)
    fake.cuDevicePrimaryCtxRetain = lambda index: (success, f"primary of {index}")
    fake.cuCtxPushCurrent = lambda context: (current.append(context), (success,))[1]
    fake.cuCtxPopCurrent = lambda: (success, current.pop())
    fake.cuStreamCreateWithPriority = create
    bindings, cuda = ModuleType("cuda.bindings"), ModuleType("cuda")
    bindings.driver, cuda.bindings = fake, bindings
    for name, module in (("cuda", cuda), ("cuda.bindings", bindings), ("cuda.bindings.driver", fake)):
        monkeypatch.setitem(sys.modules, name, module)
    made = []
    monkeypatch.setattr(queues, "int", lambda handle: handle, raising=False)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: made.append((handle, device)))
    queues.own_stream(torch.device("cuda", 1), -1)
    assert made == [(("primary of 1", -1), torch.device("cuda", 1))]
    assert current == []


def test_no_rank_has_torch_make_streams():
    """With the first one it makes 32 of each priority, which is more than the device has queues."""
    root = Path(crosspool.backends.cuda.__file__).parent
    found = [
        str(path.relative_to(root)) for path in root.rglob("*.py") if re.search(r"cuda\.Stream\(", path.read_text())
    ]
    assert found == []
