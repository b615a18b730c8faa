"""The resident FFN server beside peers that come late, die in the middle of a layer, or whose passes are given up, and
beside a host that stops it at any time: every pass ends, and no peer is told of sums that are not right."""

from __future__ import annotations

import ctypes
import random
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.kernels.moe import ffn  # noqa: E402
from crosspool.backends.cuda.kernels.moe_params import FFNScratch  # noqa: E402
from crosspool.backends.cuda.steps.lane_memory import WaitRule  # noqa: E402
from crosspool.backends.cuda.weights_rank.ffn_server import _STOP, FFNServer  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.backends.cuda.test_ffn_server_emulated import Lane, layers_of  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")
LAYERS, STEP, PASSES = 3, 1024, 8
PATIENCE_S = 300.0
"""For what must happen, on a machine however busy."""


class Peer:
    """A KV rank: of each layer it puts rows, raises the flag, waits for the sums and looks at them."""

    def __init__(self, layers, rows, seed, *, deadline_s, takes_choices) -> None:
        rule = WaitRule(deadline_s=deadline_s)
        self.lane = Lane(layers, rows, seed=seed, rule=rule, takes_choices=takes_choices)
        self.random = random.Random(seed)
        self.base = self.num_whole = self.num_given_up = 0
        self.expected = [self.sums_of(layer) for layer in range(LAYERS)]
        slot_bytes = 4 * self.lane.inbox.map.capacity
        self.puts = [ctypes.string_at(self.slot(parity), slot_bytes) for parity in range(2)]

    def sums_of(self, layer):
        lane, out = self.lane, torch.empty(self.lane.rows, self.lane.hidden)
        scratch = FFNScratch.for_layers(list(lane.layers), lane.rows, CPU)
        choices = lane.choices[layer & 1]
        ffn(EmulatedKernels(num_sms=3), lane.layers[layer], lane.x[layer & 1], out, scratch, choices=choices)
        return out

    def slot(self, layer):
        return self.lane.inbox.map.slot(layer)

    def put(self, layer, *, share=1.0):
        """Rows, and experts behind them; or a part of them, and whatever behind that."""
        whole = self.puts[layer & 1]
        ctypes.memmove(self.slot(layer), whole, int(len(whole) * share))

    def spoil(self, layer):
        ctypes.memset(self.slot(layer), self.random.choice((0xFF, 0x00, 0x5A)), len(self.puts[layer & 1]))

    def run_passes(self, rest):
        """rest: called half-way."""
        for number in range(1, PASSES + 1):
            self.run_pass(number)
            if number == PASSES // 2:
                rest()

    def run_pass(self, number):
        memory, self.base = self.lane.memory, number * STEP
        memory.post(self.base, LAYERS, self.lane.served.layers.data_ptr())
        dies_at = self.random.choice((None, *range(LAYERS)))
        for layer in range(LAYERS):
            self.spoil(layer)
            time.sleep(self.random.choice((0, 0, 1e-3, 2e-2)))
            if layer == dies_at:
                self.die(layer)
                break
            self.put(layer)
            self.lane.raise_flag(self.base + layer + 1)
            if not self.is_answered(layer):
                break
        self.wait_for(lambda: memory.done_epoch >= self.base + LAYERS)
        self.settle()

    def die(self, layer):
        """In the middle of a layer; its process's end, or its host, has the pass given up sooner or later."""
        self.put(layer, share=self.random.random())
        time.sleep(self.random.choice((0, 1e-3, 5e-2)))
        self.lane.memory.abort(self.base + LAYERS)
        if self.random.random() < 0.5:  # only slow: it goes on, too late or just in time
            self.put(layer)
            self.lane.raise_flag(self.base + layer + 1)

    def is_answered(self, layer):
        """Whether the layer's sums come; the pass may end instead."""
        epoch, memory = self.base + layer + 1, self.lane.memory
        self.wait_for(lambda: self.lane.answered >= epoch or memory.done_epoch >= self.base + LAYERS)
        if self.lane.answered < epoch:
            return False
        assert torch.equal(self.lane.sums(layer), self.expected[layer]), f"pass {self.base // STEP}, layer {layer}"
        return True

    def settle(self):
        late = self.lane.memory.late_epoch(0)
        if late // STEP == self.base // STEP:
            self.num_given_up += 1
            assert self.lane.answered < late, "sums of a layer whose rows did not come"
            return
        self.num_whole += 1
        assert self.lane.answered == self.base + LAYERS
        assert torch.equal(self.lane.sums(LAYERS - 1), self.expected[-1])

    def wait_for(self, is_so):
        until_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until_s, f"pass {self.base // STEP} of {self.lane.rows} rows stands still"
            time.sleep(1e-4)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_pass_ends_and_nobody_is_told_of_wrong_sums(seed, tmp_path):
    layers = layers_of("qwen3_moe", tmp_path, LAYERS)
    peers = [
        Peer(layers, 2, 10 * seed, deadline_s=0.05, takes_choices=True),
        Peer(layers, 1, 10 * seed + 1, deadline_s=PATIENCE_S, takes_choices=False),
        Peer(layers, 3, 10 * seed + 2, deadline_s=PATIENCE_S, takes_choices=True),
    ]
    keeper = Lane(layers, 1)  # its passes launch the server whenever that has left
    server = FFNServer(
        EmulatedKernels(num_sms=3), CPU, [keeper.memory, *(peer.lane.memory for peer in peers)], idle_s=0.002
    )
    server.reserve(max(peer.lane.served.smem_bytes for peer in peers))
    failures, threads = [], []

    gate = threading.Barrier(len(peers))

    def rest():
        """Until the server has left, as no lane has a pass, and come again."""
        gate.wait()
        peers[0].wait_for(lambda: server._launch > 1)

    def drive(peer):
        try:
            peer.run_passes(rest)
        except (AssertionError, threading.BrokenBarrierError) as failure:
            failures.append(str(failure))
            gate.abort()

    def stop_now_and_then():
        often = random.Random(seed)
        while any(thread.is_alive() for thread in threads):
            time.sleep(often.uniform(0, 0.05))
            server._words[_STOP] = server._launch

    threads += [threading.Thread(target=drive, args=(peer,), daemon=True) for peer in peers]
    for thread in (*threads, stopper := threading.Thread(target=stop_now_and_then, daemon=True)):
        thread.start()
    step = 0
    while any(thread.is_alive() for thread in threads):
        step += 1
        keeper.raise_flag(step * STEP + LAYERS)
        server.post(keeper.memory, keeper.served, step * STEP)
        assert keeper.answered == step * STEP + LAYERS
    stopper.join()
    assert failures == []
    assert sum(peer.num_whole + peer.num_given_up for peer in peers) == len(peers) * PASSES
    assert all(peer.num_whole for peer in peers[1:])
    assert sum(peer.num_given_up for peer in peers) > 0
