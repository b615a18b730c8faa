"""Ranks without a thread of their own: they work within `poll`, and nothing keeps a caller from being heard."""

import threading
import time

import pytest

from crosspool.cluster.base import ModelFailed, ModelReady, RankFailed, StepDone
from crosspool.cluster.start import start_cluster
from crosspool.cluster.turned_host import TurnedHost
from tests.support.fake_backend import FakeModel
from tests.support.lane_driver import LaneDriver, Sequence_, wait_for
from tests.support.real_cluster import add_models, make_config, running

ALL = (("kv0", "w0"),)


def test_a_step_runs_in_the_thread_that_polls_and_in_no_other(tmp_path):
    before = set(threading.enumerate())
    with running(make_config("inprocess", hosts=ALL)) as cluster:
        assert all(isinstance(host, TurnedHost) for host in cluster._hosts)
        add_models(cluster, {"m": FakeModel()}, tmp_path, ("w0",))
        cluster.submit(LaneDriver(0, "m", [Sequence_((1, 2), 1)]).next_step())
        time.sleep(0.05)
        assert cluster._hosts[0]._inbox.to_host, "nothing happens before the next poll"
        (done,) = wait_for(cluster, StepDone)
        assert len(done.result.sampled) == 1
        assert {thread.name for thread in set(threading.enumerate()) - before} == set()


def test_a_caller_is_heard_in_the_middle_of_a_step(tmp_path):
    with running(make_config("inprocess", hosts=ALL)) as cluster:
        add_models(cluster, {"m": FakeModel(num_layers=60, max_delay_s=0.02)}, tmp_path, ("w0",))
        cluster.submit(LaneDriver(0, "m", [Sequence_((1, 2), 1)]).next_step())
        threading.Timer(0.1, cluster.wake).start()
        begin = time.monotonic()
        assert cluster.poll(30.0) == []
        assert time.monotonic() - begin < 10.0, "it returned at the end of its own limit"
        assert wait_for(cluster, StepDone)


def test_a_load_ends_a_sleeping_poll(tmp_path):
    with running(make_config("inprocess", hosts=ALL)) as cluster:
        cluster.add_model(FakeModel(load_s=0.3).placement("m", tmp_path / "m", ("w0",)))
        begin = time.monotonic()
        assert wait_for(cluster, ModelReady)
        assert time.monotonic() - begin < 3.0


def test_ranks_that_cannot_be_made_are_told_of(tmp_path, monkeypatch):
    def fails(config, rank):
        raise MemoryError("no room for the arena")

    monkeypatch.setattr("crosspool.cluster.host.make_worker", fails)
    cluster = start_cluster(make_config("inprocess", hosts=ALL))
    try:
        events = [event for _ in range(20) for event in cluster.poll(0.05)]
    finally:
        cluster.close()
    failed = [event for event in events if isinstance(event, RankFailed)]
    assert {event.rank for event in failed} == {"kv0", "w0"}
    assert "no room for the arena" in failed[0].error


def test_a_bug_in_a_loop_ends_its_ranks_and_says_why(tmp_path, monkeypatch):
    with running(make_config("inprocess", hosts=ALL)) as cluster:
        add_models(cluster, {"m": FakeModel()}, tmp_path, ("w0",))
        loop = cluster._hosts[0]._loop

        def breaks():
            raise RuntimeError("a bug of the loop")

        monkeypatch.setattr(loop, "work", breaks)
        events = [event for _ in range(20) for event in cluster.poll(0.05)]
    errors = [event.error for event in events if isinstance(event, RankFailed | ModelFailed)]
    assert errors
    assert all("a bug of the loop" in error for error in errors)


@pytest.mark.parametrize("is_loading", [False, True])
def test_close_leaves_nothing(is_loading, tmp_path):
    before = set(threading.enumerate())
    cluster = start_cluster(make_config("inprocess", hosts=ALL))
    if is_loading:
        cluster.add_model(FakeModel(load_s=0.3).placement("m", tmp_path / "m", ("w0",)))
        cluster.poll(0.05)
    cluster.close()
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()
