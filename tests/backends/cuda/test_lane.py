"""A lane on a device that no longer answers, and one whose channels are closed while a model loads."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.link import Site  # noqa: E402
from crosspool.backends.cuda.device.driver import Driver  # noqa: E402
from crosspool.backends.cuda.steps.lane import WorkerLane  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import ABORT, WaitRule  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = pytest.mark.judge


class Stream:
    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure

    def query(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return False


class Channel:
    def close(self) -> None: ...


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


def test_a_load_finds_out_that_channels_were_closed_meanwhile():
    made, links = lane(None), (Channel(), Channel())
    made.stream = None  # no device: nothing is captured
    made.links = {"w0": links[0], "w1": links[1]}
    made.find_pass("m", links, "key", object)
    assert made.holds(links)
    made.close_link("w1")
    assert not made.holds(links)
    made.links["w1"] = Channel()
    assert not made.holds(links), "new ones are others"
    assert made.prepare_loop("m", links, "key") is None
