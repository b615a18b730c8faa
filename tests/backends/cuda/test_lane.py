"""A lane on a device that no longer answers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.driver import Driver  # noqa: E402
from crosspool.backends.cuda.lane import WorkerLane  # noqa: E402
from crosspool.backends.cuda.lane_memory import ABORT, WaitRule  # noqa: E402
from crosspool.backends.cuda.link import Site  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = pytest.mark.judge


class Stream:
    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure

    def query(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return False


def lane(failure):
    made = WorkerLane(Site("w0", torch.device("cpu"), Driver("w0"), {"w0": 0}, None), WaitRule(), EmulatedKernels())
    made.stream = Stream(failure)
    return made


def test_a_step_that_is_given_up_ends_its_waits():
    healthy = lane(None)
    healthy.give_up(2048)
    assert healthy.memory._host_words[ABORT] == 2048


def test_a_process_without_its_gpu_ends():
    with pytest.raises(SystemExit, match="w0: GPU 0 is lost to this process: illegal address"):
        lane(RuntimeError("illegal address")).give_up(2048)
