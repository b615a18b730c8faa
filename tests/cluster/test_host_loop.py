"""The host's loop: it sleeps only when nothing is there, wakes for everything that comes, and beats while it works."""

import select
import threading
import time

import pytest

from crosspool.cluster.doorbell import Board, Doorbell, ringer
from crosspool.cluster.host_loop import LONG_NAP_S, LONGEST_NAP_S, HostLoop
from crosspool.cluster.messages import CloseChannels, Stop
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.thread_host import ThreadInbox
from tests.support.awaited import until


class StubLoop:
    """A rank's loop whose work is counted out by the test."""

    def __init__(self, name="kv0"):
        self.name = name
        self.num_ready = 0
        self.is_busy = self.rests = False
        self.handled = []
        self.num_looks = 0
        self.nap = 0.0
        self.when_looked = lambda: None
        self.said_hello = self.is_closed = False

    def has_work(self):
        self.num_looks += 1
        self.when_looked()
        return self.num_ready > 0

    def nap_s(self):
        return self.nap

    def looks(self):
        return [self.has_work]

    def advance(self):
        if self.num_ready == 0:
            return False
        self.num_ready -= 1
        return True

    def handle(self, message):
        self.handled.append(message)

    def hello(self):
        self.said_hello = True

    def close(self):
        self.is_closed = True


class Rig:
    def __init__(self, spin_us=0.0, num_loops=1):
        self.doorbell, self.parent = Doorbell.create(), Doorbell.create()
        self.board = Board(ArrayRegion(Board.num_bytes(2)))
        self.inbox = ThreadInbox(self.parent)
        self.loops = [StubLoop(f"r{idx}") for idx in range(num_loops)]
        self.host = HostLoop(self.loops, self.inbox, self.doorbell, self.board, 1, spin_us)
        self.ring = ringer(self.doorbell, self.board, 1)

    def close(self):
        self.doorbell.close()
        self.parent.close()


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.close()


def test_messages_reach_their_rank_and_stop_ends_the_loop():
    rig = Rig(num_loops=2)
    rig.inbox.to_host.extend([("r1", CloseChannels("w0")), ("r0", Stop())])
    rig.host.run()
    assert [loop.handled for loop in rig.loops] == [[], [CloseChannels("w0")]]
    assert all(loop.said_hello and loop.is_closed for loop in rig.loops)
    rig.close()


def test_every_turn_beats_and_every_rank_gets_a_segment():
    rig = Rig(num_loops=2)
    for loop in rig.loops:
        loop.num_ready = 5
    for _ in range(5):
        rig.host.turn()
    assert [loop.num_ready for loop in rig.loops] == [0, 0]
    assert rig.board.beat(1) == 5
    rig.close()


def test_what_comes_just_before_the_sleep_is_seen(rig):
    """A flag that is raised after the last advance, but before the mark, rings nobody: the second look finds it."""
    (loop,) = rig.loops

    def raise_flag():
        if rig.board.may_sleep(1):
            loop.num_ready = 1  # no ring: whoever raised it looked before the mark

    loop.when_looked = raise_flag
    rig.host.turn()  # would block for ever
    assert loop.num_ready == 1
    assert not rig.board.may_sleep(1)


def test_a_ring_wakes_an_idle_host_and_is_needed_only_once(rig):
    (loop,) = rig.loops
    thread = threading.Thread(target=rig.host.run)
    thread.start()
    until(lambda: rig.board.may_sleep(1))
    beat = rig.board.beat(1)
    time.sleep(0.1)
    assert rig.board.beat(1) == beat, "an idle host does not turn"
    loop.num_ready = 3
    rig.ring()
    until(lambda: loop.num_ready == 0 and rig.board.may_sleep(1))
    rig.inbox.to_host.append(("r0", Stop()))
    rig.ring()
    thread.join(5)
    assert not thread.is_alive()


def test_a_busy_host_beats_although_nothing_comes(rig):
    (loop,) = rig.loops
    loop.is_busy = True
    begun_s = time.monotonic()
    for _ in range(4):
        rig.host.turn()
    assert rig.board.beat(1) == 4
    assert 0.15 <= time.monotonic() - begun_s < 5


def test_a_look_around_finds_what_comes_meanwhile_without_a_sleep():
    rig = Rig(spin_us=5e6)
    (loop,) = rig.loops
    loop.is_busy = True

    def arrives_late():
        assert not rig.board.may_sleep(1)
        loop.num_ready = int(loop.num_looks > 20)

    loop.when_looked = arrives_late
    rig.host.turn()
    assert loop.num_ready == 1
    rig.close()


def test_a_host_whose_ranks_wait_for_devices_naps_and_does_not_look_all_the_time(rig, monkeypatch):
    naps = []
    monkeypatch.setattr("select.select", lambda fds, _, __, seconds: (naps.append(seconds), ([], [], []))[1])
    (loop,) = rig.loops
    loop.is_busy, loop.nap = True, 5e-4
    for _ in range(3):
        assert rig.host.turn()
    assert naps == [5e-4] * 3
    loop.num_ready = 1
    rig.host.turn()
    assert (loop.num_ready, len(naps)) == (0, 3)


@pytest.fixture
def dozes(monkeypatch):
    """(seconds asked of the system, descriptors that ended it) of every nap, which takes place."""
    found = []
    select_ = select.select

    def doze(fds, _, __, seconds):
        ended = select_(fds, (), (), seconds)
        found.append((seconds, ended[0]))
        return ended

    monkeypatch.setattr("select.select", doze)
    return found


def test_a_nap_is_as_long_as_asked_and_no_longer_than_a_beat_may_take(rig, dozes):
    """How late a busy machine comes back to it is not the host's affair."""
    (loop,) = rig.loops
    loop.is_busy = True
    for loop.nap, nap_s in ((0.0035, 0.0035), (60.0, LONGEST_NAP_S)):
        dozes.clear()
        begun_s = time.monotonic()
        assert rig.host.turn()
        assert time.monotonic() - begun_s >= nap_s
        assert dozes == [(nap_s, [])]


def test_naps_are_short_where_descriptors_are_too_many_to_tell_of_messages(rig, monkeypatch):
    naps = []
    monkeypatch.setattr("crosspool.cluster.host_loop.SELECT_FDS", 0)
    monkeypatch.setattr("crosspool.cluster.host_loop.time.sleep", naps.append)
    (loop,) = rig.loops
    loop.is_busy = True
    for loop.nap in (5e-4, 1.0):
        assert rig.host.turn()
    assert naps == [5e-4, 0.005]


def test_a_message_ends_a_nap(rig, dozes):
    """A prompt does not wait for the end of another lane's run."""
    (loop,) = rig.loops
    loop.is_busy, loop.nap = True, 0.05
    rig.host.turn()
    rig.inbox.to_host.append(("r0", CloseChannels("w0")))
    rig.doorbell.ring()
    rig.host.turn()
    rig.host.turn()
    assert loop.handled == [CloseChannels("w0")]
    rung = [rig.doorbell.read_fd]
    assert dozes == [(0.05, []), (0.05, rung), (0.05, [])], "the nap after the message is one whole, that before none"


@pytest.mark.parametrize(("nap_s", "is_deaf"), [(1e-3, False), (LONG_NAP_S, True)])
def test_a_long_nap_is_ended_by_the_doorbell_alone(rig, monkeypatch, nap_s, is_deaf):
    """What may wait for the next look does, and who cannot wait sees that the host naps, and rings."""
    watched = []

    def doze(fds, _, __, seconds):
        assert rig.board.naps(1)
        assert rig.board.may_sleep(1)
        watched.append(tuple(fds))
        return ([], [], [])

    monkeypatch.setattr("select.select", doze)
    rig.host._fds = [rig.doorbell.read_fd, rig.parent.read_fd]
    (loop,) = rig.loops
    loop.is_busy, loop.nap = True, nap_s
    assert rig.host.turn()
    assert not rig.board.naps(1)
    assert watched == [(rig.doorbell.read_fd,) if is_deaf else (rig.doorbell.read_fd, rig.parent.read_fd)]


def test_a_host_does_not_nap_over_a_message_that_came_before(rig, monkeypatch):
    monkeypatch.setattr("select.select", lambda *_: pytest.fail("it naps"))
    (loop,) = rig.loops
    loop.is_busy, loop.nap = True, 0.02
    rig.inbox.to_host.append(("r0", CloseChannels("w0")))
    rig.host._rest()
    assert rig.host._take_messages()
    assert loop.handled == [CloseChannels("w0")]


def test_a_lone_rank_whose_device_goes_on_is_not_looked_at_again_before_the_rest(rig, dozes):
    (loop,) = rig.loops
    loop.is_busy, loop.nap, loop.num_ready = True, 0.0035, 1
    assert rig.host.turn()
    assert dozes == [], "it may have more to run"
    loop.num_ready, loop.rests = 1, True
    assert rig.host.turn()
    assert dozes == [(0.0035, [])]
