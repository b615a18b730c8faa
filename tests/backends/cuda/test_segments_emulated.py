"""A pass driven by the host: no half of a layer begins before the crossing that it needs has been told to the host."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.cuda.channels.transport import begin_pass  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import LaneMemory, WaitRule  # noqa: E402
from crosspool.backends.cuda.steps.segments import SegmentGraphs, see  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]

CPU = torch.device("cpu")
BASE = 3 * 1024


class Inlet:
    """As `DeviceInlet`, of one peer that is never late."""

    def __init__(self) -> None:
        self.has_come = None

    def arrived(self, epoch: int) -> bool:
        return self.has_come is not None and self.has_come()


class Half:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def launch(self, stream) -> None:
        self.log.append(self.name)


def lane_with_a_pass(deadline_s: float) -> tuple[EmulatedKernels, LaneMemory]:
    kernels, lane = EmulatedKernels(), LaneMemory(CPU, WaitRule(deadline_s=deadline_s))
    lane.push(BASE, 3)
    begin_pass(kernels, lane)
    return kernels, lane


def test_the_host_is_told_of_a_crossing_once_every_peer_has_put_its_part():
    kernels, lane = lane_with_a_pass(deadline_s=20.0)
    flags = [ctypes.c_uint64(BASE + 2), ctypes.c_uint64(BASE + 3)]
    see(kernels, lane, [ctypes.addressof(flag) for flag in flags], 1)
    assert lane.seen_epoch == BASE + 2
    assert lane.late_epoch(0) == lane.late_epoch(1) == 0


def test_a_peer_that_does_not_come_is_named():
    kernels, lane = lane_with_a_pass(deadline_s=0.02)
    flags = [ctypes.c_uint64(BASE + 2), ctypes.c_uint64(BASE + 1)]
    see(kernels, lane, [ctypes.addressof(flag) for flag in flags], 1)
    assert (lane.late_epoch(0), lane.late_epoch(1)) == (0, BASE + 2)


def test_halves_are_launched_one_by_one_as_crossings_are_seen():
    _, lane = lane_with_a_pass(deadline_s=1.0)
    log: list[str] = []
    inlet = Inlet()
    segments = SegmentGraphs("pass", tuple(Half(name, log) for name in "abc"), source=None, bodies=(), num_bytes=0)
    waits = segments.drive(None, lane, [inlet], BASE)
    first = next(waits)
    assert (log, first.satisfied()) == (["a"], False)
    lane._host_words[-1] = BASE + 1
    assert first.satisfied()
    second = next(waits)
    assert (log, second.satisfied()) == (["a", "b"], False)
    lane._host_words[-1] = BASE + 2
    assert second.satisfied()
    assert list(waits) == []
    assert log == ["a", "b", "c"]
    assert inlet.has_come is None, "from here on the inlet tells of the pass's end"
