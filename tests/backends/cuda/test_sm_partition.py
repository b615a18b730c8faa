"""Where a lane's chunks run: what is enqueued on one stream comes before what follows on the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device import sm_partition  # noqa: E402
from crosspool.backends.cuda.device.driver import Driver  # noqa: E402
from crosspool.backends.cuda.device.sm_partition import PrefillStreams, SmPartition  # noqa: E402
from tests.backends.cuda.fake_driver import put_in_place  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")


class Stream:
    def __init__(self, name="whole") -> None:
        self.name, self.behind, self.has_ended = name, [], False

    def query(self) -> bool:
        return self.has_ended

    def wait_stream(self, other) -> None:
        self.behind.append(other.name)


class Partition:
    def stream(self, driver, device, priority):
        return Stream("part" if priority == 0 else "urgent")


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    def own_stream(device, priority=0):
        return Stream("whole" if priority == 0 else "urgent")

    monkeypatch.setattr(sm_partition, "own_stream", own_stream)


def test_streams_change_with_the_neighbours_and_keep_the_order():
    made = PrefillStreams(Driver("kv0"), CPU, Partition())
    assert set(made.by_share) == {False, True}
    picked = [made.pick(is_shared) for is_shared in (False, True, True, False)]
    assert [stream.name for stream in picked] == ["whole", "part", "part", "whole"]
    assert made.by_share[True].behind == ["whole"]
    assert made.by_share[False].behind == ["part"]
    assert not made.is_shared


def test_urgent_pieces_stay_in_the_partition():
    made = PrefillStreams(Driver("w0"), CPU, Partition())
    picked = [made.pick(*choice) for choice in ((True, False), (True, True), (False, True), (True, True))]
    assert [stream.name for stream in picked] == ["part", "urgent", "whole", "urgent"]
    assert picked[1].behind == ["part", "whole"]
    assert made.is_shared
    assert [stream.name for stream in made.all] == ["whole", "part", "urgent"]


def test_without_partitions_there_is_one_stream():
    made = PrefillStreams(Driver("kv0"), CPU, None)
    assert made.pick(True) is made.pick(False)
    assert list(made.by_share) == [False]
    assert not made.is_shared
    assert made.pick(True, True).name == "urgent"
    assert made.is_shared in made.by_share, "graphs of spans are captured for these"


def test_nothing_waits_for_a_stream_that_has_ended_or_was_never_used():
    made = PrefillStreams(Driver("p0"), CPU, Partition())
    part = made.pick(True)
    part.has_ended = True
    assert made.pick(False).behind == part.behind == []
    assert made.pick(True).behind == ["whole"]


def test_the_driver_is_asked_for_a_partition_and_its_streams(monkeypatch):
    asked = []

    def answer(name, *results):
        return lambda *arguments: (asked.append((name, *arguments)), results)[1]

    group = SimpleNamespace(sm=SimpleNamespace(smCount=96))
    calls = {
        "cuInit": lambda flags: (),
        "cuDeviceGet": lambda index: (f"device {index}",),
        "cuDeviceGetDevResource": answer("resource", "whole"),
        "cuDevSmResourceSplitByCount": answer("split", [group], 1, "rest"),
        "cuDevResourceGenerateDesc": answer("describe", "description"),
        "cuGreenCtxCreate": answer("create", "green"),
        "cuGreenCtxStreamCreate": answer("stream", 77),
    }
    put_in_place(
        monkeypatch,
        calls,
        CUdevResourceType=SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm"),
        CUgreenCtxCreate_flags=SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM="default"),
        CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING="non-blocking"),
    )
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    made = SmPartition.create(Driver("kv0"), 1, 92)
    assert made == SmPartition("green", 96)
    assert made.stream(Driver("kv0"), CPU, -1) == (77, CPU)
    assert asked == [
        ("resource", "device 1", "sm"),
        ("split", 1, "whole", 0, 92),
        ("describe", [group], 1),
        ("create", "description", "device 1", "default"),
        ("stream", "green", "non-blocking", -1),
    ]
