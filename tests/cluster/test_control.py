"""Control sockets: whole messages in order, descriptors beside them, and a side that reads nothing or is gone."""

import os
import socket

import numpy as np
import pytest

from crosspool.cluster.control import ControlSocket
from crosspool.cluster.messages import Forget, Hello, OpenChannels, Stop
from crosspool.cluster.region import FileRegion


@pytest.fixture
def pair():
    ours, theirs = (ControlSocket(sock) for sock in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def receive_all(control, num_messages):
    messages = []
    while len(messages) < num_messages:
        messages += control.receive()
    return messages


def test_messages_arrive_whole_and_in_order(pair):
    ours, theirs = pair
    sent = [("kv0", Forget(tuple(range(n)))) for n in range(50)]
    for message in sent:
        ours.queue(message)
    assert receive_all(theirs, 50) == sent
    assert theirs.receive() == []
    theirs.send(("kv0", Hello()))
    assert receive_all(ours, 1) == [("kv0", Hello())]


def test_regions_cross_with_their_memory_each_to_its_message(pair):
    ours, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    regions = [FileRegion.create(4096) for _ in range(40)]
    for number, region in enumerate(regions):
        region.map()[0] = number
        ours.queue(("w0", Forget((number,))))
        ours.queue(("w0", OpenChannels(number, "kv0", 1, region)))
        region.close()
    opened = [message for _, message in receive_all(theirs, 80) if isinstance(message, OpenChannels)]
    assert [message.region.map()[0] for message in opened] == [message.lane for message in opened] == list(range(40))
    for message in opened:
        message.region.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_side_that_reads_nothing_does_not_block_the_parent(pair):
    ours, theirs = pair
    sent = [("kv0", Forget(tuple(range(20_000)))) for _ in range(30)]
    region = FileRegion.create(4096)
    for message in sent:
        ours.queue(message)
    ours.queue(("kv0", OpenChannels(3, "w0", 1, region)))
    region.close()
    assert ours.has_unsent
    received = []
    while ours.has_unsent:
        ours.flush()
        received += theirs.receive()
    received += theirs.receive()
    assert received[:30] == sent
    ((_, opened),) = received[30:]
    assert opened.region.map()[0] == 0
    opened.region.close()
    assert not ours.has_unsent


def test_what_was_said_before_the_end_is_read_before_the_end_is_told(pair):
    ours, theirs = pair
    ours.queue(("kv0", Stop()))
    ours.close()
    assert theirs.receive() == [("kv0", Stop())]
    with pytest.raises(EOFError):
        theirs.receive()


def test_sending_to_one_that_is_gone_drops_the_message_and_its_descriptor(pair):
    ours, theirs = pair
    theirs.close()
    before = len(os.listdir("/proc/self/fd"))
    region = FileRegion.create(4096)
    ours.queue(("kv0", OpenChannels(0, "w0", 1, region)))
    region.close()
    assert not ours.has_unsent
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(EOFError):
        ours.receive()


def test_a_host_that_sends_to_a_dead_parent_learns_of_it(pair):
    ours, theirs = pair
    ours.close()
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send(("kv0", Forget(tuple(np.arange(10).tolist()))))
