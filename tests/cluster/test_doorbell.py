"""Doorbells and the board."""

import os
import select

import pytest

from crosspool.cluster.doorbell import Board, Doorbell, ringer
from crosspool.cluster.region import ArrayRegion


def is_readable(doorbell):
    return bool(select.select([doorbell.read_fd], [], [], 0)[0])


@pytest.fixture(params=["eventfd", "pipe"])
def doorbell(request, monkeypatch):
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd")
    made = Doorbell.create()
    assert len(made.fds) == (1 if request.param == "eventfd" else 2)
    yield made
    made.close()


def test_a_ring_is_seen_once_until_it_is_drained(doorbell):
    assert not is_readable(doorbell)
    doorbell.drain()
    for _ in range(5):
        doorbell.ring()
    assert is_readable(doorbell)
    doorbell.drain()
    assert not is_readable(doorbell)


def test_rings_that_nobody_hears_do_not_block(doorbell):
    for _ in range(20_000):
        doorbell.ring()
    doorbell.drain()
    assert not is_readable(doorbell)


def test_only_a_host_that_may_sleep_is_rung(doorbell):
    board = Board(ArrayRegion(Board.num_bytes(3)))
    ring = ringer(doorbell, board, 1)
    board.set_asleep(0, True)
    board.set_asleep(2, True)
    ring()
    assert not is_readable(doorbell)
    board.set_asleep(1, True)
    ring()
    assert is_readable(doorbell)


def test_hosts_words_do_not_mix():
    board = Board(ArrayRegion(Board.num_bytes(4)))
    for host in range(4):
        board.set_beat(host, 100 + host)
        board.set_asleep(host, host % 2 == 0)
    assert [board.beat(host) for host in range(4)] == [100, 101, 102, 103]
    assert [board.may_sleep(host) for host in range(4)] == [True, False, True, False]
