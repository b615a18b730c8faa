"""Which messages make a host that naps look at once, and that one which still starts ends at once."""

from __future__ import annotations

import logging
import select
import sys
import time
from types import SimpleNamespace

import pytest

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.messages import AbortStep, Forget, Step
from crosspool.cluster.process_host import GROUP_SIGNALS, ProcessHost, Spawner
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.start import start_cluster
from crosspool.scheduler.step import StepHeader
from tests.support.real_cluster import make_config

HEADER = StepHeader(lane=0, model="m", step_seq=2, phase="decode", num_tokens=1)


@pytest.fixture
def host():
    board, bells = Board(ArrayRegion(Board.num_bytes(2))), [Doorbell.create() for _ in range(3)]
    config = ClusterConfig(num_frames=4, frame_bytes=4096, max_tokens_per_step=8)
    made = ProcessHost(config, 0, bells, board, None, None)
    made.sent = []
    made._control = SimpleNamespace(queue=made.sent.append, flush=lambda: None, has_unsent=True)
    yield SimpleNamespace(process=made, board=board, bell=bells[0])
    for bell in bells:
        bell.close()


def test_a_child_that_has_not_begun_to_ignore_signals_lives_through_them():
    spawner = Spawner()
    program = f"import os; [os.kill(os.getpid(), number) for number in {[int(number) for number in GROUP_SIGNALS]}]"
    try:
        child = spawner.start([sys.executable, "-c", program], (), {})
        assert child.wait(timeout=30) == 0
    finally:
        spawner.close()


def has_rung(host):
    return bool(select.select([host.bell.read_fd], (), (), 0)[0])


@pytest.mark.parametrize(
    ("message", "rings"),
    [(Step(HEADER, 1), False), (Step(HEADER), True), (AbortStep(0, 1), True), (Forget((1,)), True)],
)
def test_only_a_step_behind_another_waits_for_the_end_of_a_nap(host, message, rings):
    host.board.set_napping(0)
    host.process.send("kv0", message)
    assert host.process.sent == [("kv0", message)]
    assert host.board.post(0) == 1
    assert has_rung(host) == rings


@pytest.mark.parametrize("is_asleep", [False, True])
def test_a_host_that_does_not_nap_is_told_by_its_socket(host, is_asleep):
    host.board.set_asleep(0, is_asleep)
    host.process.send("kv0", AbortStep(0, 1))
    assert not has_rung(host)


def test_what_had_no_room_in_the_socket_ends_a_nap_when_it_is_sent(host):
    host.board.set_napping(0)
    assert host.process.flush()
    assert has_rung(host)


def test_a_process_that_still_starts_does_not_hold_up_the_end(caplog, monkeypatch):
    monkeypatch.setattr("crosspool.cluster.host_watch.STOP_TIMEOUT_S", 60.0)
    cluster = start_cluster(make_config("processes", 1, backend="tests.support.slow_to_start"))
    cluster.poll(0.1)
    processes = [host._process for host in cluster._hosts]
    begin_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        cluster.close()
    assert time.monotonic() - begin_s < 30.0
    assert [record.getMessage() for record in caplog.records] == []
    assert all(process.returncode is not None for process in processes)
