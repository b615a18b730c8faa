"""Hosts that hang, end or are accused: who is ended, what is said of it, and who is left alone."""

import pytest

from crosspool.cluster.doorbell import Board
from crosspool.cluster.host_watch import HANG_FACTOR, HostWatch
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.supervisor import RankState
from tests.support.stepped_cluster import SteppedHost
from tests.support.stepped_lanes import make_config


class Rig:
    """Hosts that are up, and a clock that the test turns, in looks that are never far apart."""

    def __init__(self):
        self.config, self.now_s = make_config(1), 0.0
        self.board = Board(ArrayRegion(Board.num_bytes(len(self.config.all_hosts))))
        self.hosts = [
            SteppedHost(self.config, number, self.board, lambda: self.now_s)
            for number in range(len(self.config.all_hosts))
        ]
        self.watch = HostWatch(self.hosts, self.board, self.config, lambda: self.now_s)
        for number, host in enumerate(self.hosts):
            self.watch.launch(number, self.now_s)
            for rank in host.ranks:
                self.watch.supervisor.said_hello(rank)

    def pass_time(self, deadlines, owing):
        """Those found to hang meanwhile."""
        found = []
        for _ in range(20):
            self.now_s += deadlines * self.config.step_deadline_s / 20
            found += self.watch.hung(self.now_s, owing)
        return found


@pytest.fixture
def rig():
    return Rig()


def test_only_a_host_that_owes_work_can_hang(rig):
    assert rig.pass_time(2 * HANG_FACTOR, owing=()) == []
    assert {number for number, _ in rig.pass_time(2 * HANG_FACTOR, owing=(1,))} == {1}


def test_an_accused_rank_is_hung_only_if_it_was_silent(rig):
    (rank, *_) = rig.hosts[1].ranks
    rig.pass_time(0.7, owing=(1,))
    assert rig.watch.accused(rank) is None
    rig.pass_time(0.7, owing=(1,))
    assert "no sign of life" in rig.watch.accused(rank)
    rig.board.set_beat(1, 7)
    assert rig.watch.accused(rank) is None


def test_what_a_host_says_of_its_end_goes_before_what_is_seen_of_it(rig):
    rig.watch.said_why(rig.hosts[1].ranks[0], "its GPU is lost")
    reasons = [rig.watch.end(1, reason, was_launched=True).reason for reason in (None, None, "gave no sign")]
    assert reasons == ["its GPU is lost", "killed in a test", "gave no sign"]
    assert rig.hosts[1].num_shown == 1, "stacks are of use where it hangs"


def test_a_thread_that_hangs_is_left_alone_and_one_that_ended_does_not_come_back(rig, monkeypatch):
    monkeypatch.setattr(rig.hosts[1], "kill", lambda: False)
    assert rig.watch.end(1, "gave no sign of life", was_launched=True) is None
    assert rig.watch.supervisor.is_up(rig.hosts[1].ranks[0])
    assert not rig.watch.end(1, None, was_launched=True).will_restart
    assert rig.watch.supervisor.state(rig.hosts[1].ranks[0]) is RankState.FAILED


def test_a_process_that_is_still_starting_is_killed_rather_than_asked(rig, monkeypatch):
    rig.watch.end(1, None, was_launched=True)
    rig.watch.launch(1, rig.now_s)
    killed = []
    for number, host in enumerate(rig.hosts):
        monkeypatch.setattr(host, "pid", 1000 + number)
        monkeypatch.setattr(host, "kill", lambda number=number: killed.append(number) or True)
        monkeypatch.setattr(host, "end", lambda until_s: True)
    assert rig.watch.stop()
    assert killed == [1]
