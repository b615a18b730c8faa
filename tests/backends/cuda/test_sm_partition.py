"""Where a lane's chunks run: what is enqueued on one stream comes before what follows on the other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.driver import Driver  # noqa: E402
from crosspool.backends.cuda.sm_partition import PrefillStreams  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")


class Stream:
    def __init__(self, name="whole") -> None:
        self.name, self.behind = name, []

    def wait_stream(self, other) -> None:
        self.behind.append(other.name)


class Partition:
    def stream(self, driver, device):
        return Stream("part")


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())


def test_streams_change_with_the_neighbours_and_keep_the_order():
    made = PrefillStreams(Driver("kv0"), CPU, Partition())
    assert set(made.by_share) == {False, True}
    picked = [made.pick(is_shared) for is_shared in (False, True, True, False)]
    assert [stream.name for stream in picked] == ["whole", "part", "part", "whole"]
    assert made.by_share[True].behind == ["whole"]
    assert made.by_share[False].behind == ["part"]
    assert not made.is_shared


def test_without_partitions_there_is_one_stream():
    made = PrefillStreams(Driver("kv0"), CPU, None)
    assert made.pick(True) is made.pick(False)
    assert list(made.by_share) == [False]
    assert not made.is_shared
