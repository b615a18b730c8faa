"""A worker may open its own channels: the loop asks it, and gives a step what it got."""

from __future__ import annotations

from crosspool.backends.base import Wait
from crosspool.cluster import messages
from crosspool.cluster.channel import link_bytes
from crosspool.cluster.rank_loop import RankLoop
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.worker import RankWorker
from crosspool.scheduler.step import StepHeader
from tests.support.lone_rank import alone


class End:
    """Outlet and inlet at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def arrived(self, epoch: int) -> bool:
        return True


class WorkerWithLinks:
    """An FFN worker that keeps what it is asked for."""

    def __init__(self) -> None:
        self.opened, self.closed, self.ran = [], [], []

    def open_link(self, new):
        self.opened.append((new.lane, new.peer, len(new.region), new.capacity))
        return End(f"out{new.lane}"), End(f"in{new.lane}")

    def close_links(self, peer):
        self.closed.append(peer)

    def run(self, header, links):
        self.ran.append((links.outlets["kv0"].name, links.inlets["kv0"].name))
        yield Wait(tuple(links.inlets.values()), 1)

    def memory_bytes(self):
        return {}


def loop_of(worker, emitted):
    return RankLoop("w0", RankWorker(ffn_worker=worker, links=worker), alone(emitted.append))


def header(step_seq):
    return StepHeader(lane=1, model="tiny", step_seq=step_seq, phase="decode", num_tokens=1)


def test_a_step_gets_the_ends_that_the_worker_opened():
    worker, emitted = WorkerWithLinks(), []
    loop = loop_of(worker, emitted)
    loop.handle(messages.OpenChannels(1, "kv0", 64, ArrayRegion(link_bytes(64))))
    assert worker.opened == [(1, "kv0", link_bytes(64), 64)]
    loop.handle(messages.Step(header(1)))
    while loop.advance():
        pass
    assert worker.ran == [("out1", "in1")]
    assert not emitted


def test_closed_channels_are_the_workers_to_close():
    worker, emitted = WorkerWithLinks(), []
    loop = loop_of(worker, emitted)
    loop.handle(messages.OpenChannels(1, "kv0", 64, ArrayRegion(link_bytes(64))))
    loop.handle(messages.CloseChannels("kv0"))
    assert worker.closed == ["kv0"]
    loop.handle(messages.Step(header(1)))
    assert "has no channels" in emitted[-1].error
