"""A lane on a device that no longer answers, one whose channels are closed during a load, and when its steps begin."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.channels.link import DeviceInlet, Site  # noqa: E402
from crosspool.backends.cuda.device import graphs  # noqa: E402
from crosspool.backends.cuda.device.driver import Driver  # noqa: E402
from crosspool.backends.cuda.steps.lane import WorkerLane  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import ABORT, DONE, WaitRule  # noqa: E402
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


def test_a_step_begins_at_once_unless_a_pass_is_under_way_or_a_channel_is_not_open():
    made, link = lane(None), SimpleNamespace(open=True)
    link.is_open = lambda: link.open
    inlets = (DeviceInlet(made.memory, link),)
    assert made.before_begin(inlets) is None
    made.memory.push(1024, 3)
    busy = made.before_begin(inlets)
    assert not busy.satisfied()
    made.memory._host_words[DONE] = 1027
    link.open = False
    assert not busy.satisfied(), "what it waits for is both"
    assert made.before_begin(inlets) is not None
    link.open = True
    assert busy.satisfied()
    assert made.before_begin(inlets) is None


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_replay_stands_in_a_range_of_its_name_where_a_profiler_reads_ranges(monkeypatch, is_traced):
    calls = []
    monkeypatch.setattr(graphs, "IS_TRACED", is_traced)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    executable = SimpleNamespace(launch=lambda stream: calls.append(stream))
    graphs.StepGraph("kv0 m 4", executable, None, None, 0.0, 0).replay("stream")
    assert calls == (["kv0 m 4", "stream", "end"] if is_traced else ["stream"])
