"""Channels: parity slots, flags that only grow, and a hundred thousand checked hops between two processes."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from crosspool.cluster.channel import ChannelInlet, ChannelOutlet, a2f_part, channel_bytes, f2a_part, link_bytes
from crosspool.cluster.control import ControlSocket
from crosspool.cluster.fence import Fence
from crosspool.cluster.messages import MemoryReport, OpenChannels
from crosspool.cluster.region import LINE_BYTES, ArrayRegion, FileRegion
from tests.support.hop_worker import answer, payload

CAPACITY = 24


@pytest.fixture(params=[ArrayRegion, FileRegion.create])
def region(request):
    made = request.param(link_bytes(CAPACITY))
    yield made
    made.close()


def ends(memory, rings=None):
    ring = (lambda: None) if rings is None else (lambda: rings.append(1))
    return ChannelOutlet(memory, CAPACITY, ring), ChannelInlet(memory, CAPACITY)


def rows(value, num_tokens=3, width=8):
    return np.full((num_tokens, width), value, np.float32)


def test_a_payload_arrives_with_its_flag_and_rings(region):
    rings = []
    outlet, inlet = ends(a2f_part(region.map(), CAPACITY), rings)
    assert not inlet.arrived(1)
    outlet.put(0, 1, rows(5.0))
    assert inlet.arrived(1)
    assert not inlet.arrived(2)
    assert rings == [1]
    np.testing.assert_array_equal(inlet.take(0, 3, 8), rows(5.0))


def test_a_later_epoch_counts_for_an_earlier_one(region):
    outlet, inlet = ends(a2f_part(region.map(), CAPACITY))
    outlet.put(0, 2 * 1024 + 1, rows(1.0))
    assert inlet.arrived(1024 + 900)
    assert not inlet.arrived(2 * 1024 + 2)


def test_take_is_a_view_that_holds_until_two_layers_later(region):
    outlet, inlet = ends(a2f_part(region.map(), CAPACITY))
    outlet.put(4, 5, rows(4.0))
    first = inlet.take(4, 3, 8)
    outlet.put(5, 6, rows(5.0))
    np.testing.assert_array_equal(first, rows(4.0))
    np.testing.assert_array_equal(inlet.take(5, 3, 8), rows(5.0))
    outlet.put(6, 7, rows(6.0))
    np.testing.assert_array_equal(first, rows(6.0))


def test_the_directions_of_a_link_do_not_touch(region):
    memory = region.map()
    to_ffn, at_ffn = ends(a2f_part(memory, CAPACITY))
    to_kv, at_kv = ends(f2a_part(memory, CAPACITY))
    to_ffn.put(0, 1, rows(1.0))
    to_ffn.put(1, 2, rows(2.0))
    assert not at_kv.arrived(1)
    to_kv.put(0, 7, rows(7.0))
    to_kv.put(1, 8, rows(8.0))
    assert at_ffn.arrived(2)
    assert not at_ffn.arrived(3)
    np.testing.assert_array_equal(at_ffn.take(1, 3, 8), rows(2.0))
    np.testing.assert_array_equal(at_kv.take(0, 3, 8), rows(7.0))


def test_flags_lie_alone_in_their_line(region):
    memory = region.map()
    assert np.frombuffer(memory, np.uint8).ctypes.data % LINE_BYTES == 0
    assert channel_bytes(CAPACITY) % LINE_BYTES == 0
    outlet, _ = ends(a2f_part(memory, CAPACITY))
    outlet.put(1, 1, rows(0.0))
    changed = np.flatnonzero(np.frombuffer(memory, np.uint8))
    assert changed.tolist() == [0], "a put of zeros changes the flag and nothing else of its line"


def test_rows_that_do_not_fit_are_refused_with_the_remedy(region):
    outlet, _ = ends(a2f_part(region.map(), CAPACITY))
    with pytest.raises(ValueError, match="4 tokens of width 8 do not fit a channel of 24 elements; raise max_tokens"):
        outlet.put(0, 1, rows(1.0, num_tokens=4))


def test_memory_stays_while_mapped_though_its_handle_is_closed():
    region = FileRegion.create(link_bytes(CAPACITY))
    outlet, inlet = ends(a2f_part(region.map(), CAPACITY))
    region.close()
    outlet.put(0, 1, rows(3.0))
    np.testing.assert_array_equal(inlet.take(0, 3, 8), rows(3.0))


def test_a_memory_file_without_memfd_is_an_unlinked_file(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    region = FileRegion.create(4096)
    assert os.fstat(region.fd).st_nlink == 0
    region.map()[5] = 7
    assert region.map()[5] == 7
    region.close()


def test_a_fence_can_be_crossed_any_number_of_times():
    fence = Fence()
    for _ in range(3):
        fence.full()
        fence.stores_or_loads()


def test_a_hundred_thousand_hops_between_two_processes_keep_every_payload():
    size, num_hops = 64, 50_000  # each hop goes there and back
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.support.hop_worker", str(theirs.fileno()), str(num_hops)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    with theirs:
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables)
    control = ControlSocket(ours)
    region = FileRegion.create(link_bytes(size))
    memory = region.map()
    control.queue(("w0", OpenChannels(0, "kv0", size, region)))
    region.close()
    outlet = ChannelOutlet(a2f_part(memory, size), size, lambda: None)
    inlet = ChannelInlet(f2a_part(memory, size), size)
    try:
        for hop in range(num_hops):
            layer = hop % 3
            row = payload(layer, hop + 1, size)
            outlet.put(layer, hop + 1, row)
            while not inlet.arrived(hop + 1):
                assert worker.poll() is None
                os.sched_yield()
            np.testing.assert_array_equal(inlet.take(layer, 1, size), answer(row))
        assert worker.wait(20) == 0
        assert control.receive() == [("w0", MemoryReport({"bad": 0}))]
    finally:
        worker.kill()
        worker.wait()
        control.close()
