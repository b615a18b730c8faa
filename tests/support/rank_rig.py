"""One rank's loop by itself, with a scripted worker; the other side of its channels is the test."""

import numpy as np

from crosspool.backends.base import Wait
from crosspool.cluster import messages
from crosspool.cluster.channel import ChannelInlet, ChannelOutlet, a2f_part, f2a_part, link_bytes
from crosspool.cluster.rank_loop import RankLoop
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.worker import RankWorker
from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.scheduler.step import StepDescriptor, StepHeader, epoch
from tests.support.fake_backend import FakeModel
from tests.support.lone_rank import alone

CAPACITY = 64
DEADLINE_S = 5.0


class ScriptedAttention:
    """A KV half that puts one row a layer and waits for the answer; it logs which lane ran."""

    def __init__(self):
        self.log = []
        self.closed = []
        self.num_layers = 3
        self.cost_s = 0.0
        self.clock = None
        self.fails_at = None
        self.forgotten = []
        self.told = {}  # by layer: tokens that its wait tells
        self.rest = None  # of its waits
        self.inlets_of = lambda layer, inlets: inlets
        self.models = set()
        self.may_begin_ahead = lambda work: True

    def add_model(self, placement, progress):
        progress(1, 1)
        self.models.add(placement.name)

    def remove_model(self, model):
        self.models.remove(model)

    def memory_bytes(self):
        return {"attention_weights": len(self.models), "kv_cache": 1, "ffn_weights": 0}

    def forget(self, sequence_ids):
        self.forgotten += sequence_ids

    def run(self, step, links):
        header = step.header
        try:
            for layer in range(self.num_layers):
                self.log.append((header.lane, layer))
                self.clock.now_s += self.cost_s
                if self.fails_at == (header.lane, layer):
                    raise RuntimeError("out of\nluck")
                for outlet in links.outlets.values():
                    outlet.put(layer, epoch(header.step_seq, layer), np.ones((1, 8), np.float32))
                told = self.told.get(layer, ())
                inlets = self.inlets_of(layer, tuple(links.inlets.values()))
                yield Wait(inlets, epoch(header.step_seq, layer), told, self.rest)
            return (header.step_seq,)
        except GeneratorExit:
            self.closed.append((header.lane, header.step_seq))
            raise


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class KVRig:
    """A KV rank's loop with `peers`, whose ends are in the hands of the test."""

    def __init__(self, directory, peers=("w0",), num_lanes=3, order="ticket", share=None, goes_ahead=False):
        self.clock = Clock()
        self.worker = ScriptedAttention()
        self.worker.clock = self.clock
        self.said = []
        self.rung = []
        around = alone(
            self.said.append,
            ring=lambda peer: lambda: self.rung.append(peer),
            clock=self.clock,
            order=ORDER_POLICIES[order],
            step_deadline_s=DEADLINE_S,
        )
        ahead = self.worker if goes_ahead else None
        self.loop = RankLoop("kv0", RankWorker(attention_worker=self.worker, share_worker=share, ahead=ahead), around)
        self.out, self.into, self.regions = {}, {}, {}
        self.peers = peers
        self.loop.handle(messages.AddModel(FakeModel().placement("m", directory, peers), 1))
        self.loop.advance()
        for lane in range(num_lanes):
            for peer in peers:
                self.open(lane, peer)
        self.said.clear()

    def open(self, lane, peer):
        self.regions[lane, peer] = region = ArrayRegion(link_bytes(CAPACITY))
        self.out[lane, peer] = ChannelOutlet(f2a_part(region.map(), CAPACITY), CAPACITY, lambda: None)
        self.into[lane, peer] = ChannelInlet(a2f_part(region.map(), CAPACITY), CAPACITY)
        self.loop.handle(messages.OpenChannels(lane, peer, CAPACITY, region))

    def step(self, lane=0, step_seq=1, priority=0, behind=0):
        header = StepHeader(lane=lane, model="m", step_seq=step_seq, phase="decode", num_tokens=1, priority=priority)
        self.loop.handle(messages.Step(StepDescriptor(header=header, rows=()), behind))

    def answer(self, lane, layer, step_seq=1, peers=None):
        for peer in peers or self.peers:
            self.out[lane, peer].put(layer, epoch(step_seq, layer), np.zeros((1, 8), np.float32))

    def spin(self):
        while self.loop.advance():
            pass
