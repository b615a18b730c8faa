"""Nothing is left: after close, after crashes of ranks, after the parent itself was killed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from crosspool.cluster.base import RankLost, RankReady
from tests.support.fake_backend import FakeModel
from tests.support.lane_driver import LaneDriver, Run, Sequence_, wait_for
from tests.support.real_cluster import (
    LAYOUTS,
    add_models,
    children,
    holdings,
    is_running,
    left_since,
    make_config,
    pids,
    running,
)

PARENT = """
import os, sys, time
from pathlib import Path
from tests.support.fake_backend import FakeModel
from tests.support.real_cluster import add_models, make_config, pids, running

with running(make_config("processes", 2)) as cluster:
    add_models(cluster, {"m": FakeModel(num_layers=3)}, Path(sys.argv[1]), ("w0", "w1"))
    print(*pids(cluster).values(), flush=True)
    if sys.argv[2] == "leave":
        sys.exit(0)
    if sys.argv[2] == "forget":
        os._exit(0)
    time.sleep(600)
"""


def use(layout, directory):
    with running(make_config(layout, 2)) as cluster:
        add_models(cluster, {"m": FakeModel(), "n": FakeModel(hidden_size=32)}, directory, ("w0", "w1"))
        Run(cluster, [LaneDriver(0, "m", [Sequence_((1, 2), 3)]), LaneDriver(5, "n", [Sequence_((1, 2), 3)])]).to_end()
        cluster.remove_model("n")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_left_after_close(tmp_path, layout):
    use(layout, tmp_path)  # imports and caches of the first use are not leaks
    before = holdings()
    for _ in range(3):
        use(layout, tmp_path)
    assert left_since(before) == {}


def test_nothing_is_left_of_ranks_that_were_killed(tmp_path):
    with running(make_config("processes", 2)) as cluster:
        add_models(cluster, {"m": FakeModel()}, tmp_path, ("w0", "w1"))
        before = holdings()
        for rank in ("w0", "kv0", "w1", "w0"):
            os.kill(pids(cluster)[rank], signal.SIGKILL)
            wait_for(cluster, RankLost)
            wait_for(cluster, RankReady)
            assert sorted(children()) == sorted(pids(cluster).values())
        left = left_since(before)
        assert sorted(left.pop("children")) == sorted(pids(cluster).values()), "those that were started anew"
        assert not {kind: names for kind, names in left.items() if kind != "fds"}
        assert holdings()["fds"].total() <= before["fds"].total(), "a socket for each, in place of the old one"


def test_closing_twice_or_with_a_stopped_rank_leaves_nothing(tmp_path):
    use("processes", tmp_path)
    before = holdings()
    with running(make_config("processes", 1)) as cluster:
        os.kill(pids(cluster)["w0"], signal.SIGSTOP)
        cluster.close()
    assert left_since(before) == {}


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "leave", "forget"])
def test_ranks_die_with_their_parent_even_stopped_ones(tmp_path, how):
    before = holdings()
    command = [sys.executable, "-c", PARENT, str(tmp_path), how]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as parent:
        ranks = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(ranks) == 3
        if how.startswith("SIG"):
            os.kill(ranks[1], signal.SIGSTOP)
            parent.send_signal(signal.Signals[how])
        parent.wait(20)
    until_s = time.monotonic() + 10
    while alive := [pid for pid in ranks if is_running(pid)]:
        assert time.monotonic() < until_s, f"still running: {alive}"
        time.sleep(0.02)
    assert left_since(before) == {}


def test_ranks_ignore_the_signals_of_their_process_group(tmp_path):
    """Ctrl-C, SIGTERM and SIGHUP to the group are the parent's business: running requests may end first."""
    with running(make_config("processes", 1)) as cluster:
        add_models(cluster, {"m": FakeModel()}, tmp_path, ("w0",))
        for pid in pids(cluster).values():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
        lane = LaneDriver(0, "m", [Sequence_((1, 2), 3)])
        run = Run(cluster, [lane])
        run.to_end()
        assert not [event for event in run.events if isinstance(event, RankLost)]


def test_a_rank_outlives_the_thread_that_restarted_it(tmp_path):
    """The system ties a child to the thread that started it; restarts must not depend on the caller's."""
    with running(make_config("processes", 1)) as cluster:
        add_models(cluster, {"m": FakeModel()}, tmp_path, ("w0",))
        os.kill(pids(cluster)["w0"], signal.SIGKILL)
        helper = threading.Thread(target=lambda: wait_for(cluster, RankReady))
        helper.start()
        helper.join(20)
        pid = pids(cluster)["w0"]
        time.sleep(0.2)
        assert is_running(pid)
        assert cluster.poll(0.1) == []


def test_a_thread_that_is_in_a_long_segment_at_close_ends_by_itself_later(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("crosspool.cluster.host_watch.STOP_TIMEOUT_S", 0.05)
    with running(make_config("inprocess", 1)) as cluster:
        add_models(cluster, {"m": FakeModel(num_layers=40, max_delay_s=0.2)}, tmp_path, ("w0",))
        cluster.submit(LaneDriver(0, "m", [Sequence_((1, 2), 1)]).next_step())
        time.sleep(0.02)
        threads = [host._thread for host in cluster._hosts]
        cluster.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_closing_waits_for_a_load_that_is_under_way(tmp_path):
    """A load's thread rings its host's doorbell, whose descriptor another may own once the cluster is closed."""
    failures = []
    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        with running(make_config("inprocess")) as cluster:
            cluster.add_model(FakeModel(load_s=0.5).placement("m", tmp_path / "m", ("w0",)))
            cluster.poll(0.05)
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("load-")]
        time.sleep(0.6)
    finally:
        threading.excepthook = hook
    assert failures == []
