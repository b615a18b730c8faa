"""Threads and processes: the same tokens, models at run time, and nothing used when idle."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from crosspool.cluster.base import LoadProgress, ModelFailed, ModelReady, RankFailed, RankReady, StepDone, StepFailed
from crosspool.cluster.start import start_cluster
from tests.support.awaited import until
from tests.support.fake_backend import FakeModel, expected_tokens
from tests.support.lane_driver import LaneDriver, Run, Sequence_, wait_for
from tests.support.real_cluster import LAYOUTS, add_models, cpu_s, make_config, pids, running

pytestmark = pytest.mark.parametrize("layout", LAYOUTS)


def check_tokens(lanes, models, num_weights_ranks):
    for lane in lanes:
        for sequence in lane.sequences:
            expected = expected_tokens(models[lane.model], sequence.prompt, sequence.num_tokens, num_weights_ranks)
            assert sequence.outputs == expected, f"lane {lane.lane}"


@pytest.mark.parametrize("hosts", ["apart", "weights together", "all together"])
@pytest.mark.parametrize("num_weights_ranks", [1, 2, 3])
def test_both_layouts_give_the_undivided_tokens_under_random_delays(tmp_path, layout, num_weights_ranks, hosts):
    models = {
        "shallow": FakeModel(num_layers=1, max_delay_s=1e-3),
        "deep": FakeModel(num_layers=7, salt=2, max_delay_s=1e-3),
        "wide": FakeModel(num_layers=2, salt=3, hidden_size=24),
    }
    config = make_config(layout, num_weights_ranks)
    groups = {"apart": (), "weights together": (config.weights_ranks,), "all together": (config.ranks,)}
    with running(make_config(layout, num_weights_ranks, hosts=groups[hosts], order="ticket")) as cluster:
        add_models(cluster, models, tmp_path, config.weights_ranks)
        names = list(models)
        lanes = [
            LaneDriver(n, names[n % 3], [Sequence_((n, 1, 2), 8), Sequence_((n, 5), 6)], is_ahead=n < 2)
            for n in range(4)
        ]
        Run(cluster, lanes).to_end()
        check_tokens(lanes, models, num_weights_ranks)


def test_a_shallow_model_is_not_held_by_a_deep_one(tmp_path, layout):
    models = {"shallow": FakeModel(num_layers=1), "deep": FakeModel(num_layers=60, max_delay_s=4e-3)}
    with running(make_config(layout, 1, order="ticket")) as cluster:
        add_models(cluster, models, tmp_path, ("w0",))
        lanes = [LaneDriver(0, "deep", [Sequence_((1,), 1)]), LaneDriver(1, "shallow", [Sequence_((1,), 20)])]
        run = Run(cluster, lanes)
        run.to_end()
        check_tokens(lanes, models, 1)
        done = [event.result.lane for event in run.events if isinstance(event, StepDone)]
        assert done.index(0) >= 10, f"order of finished steps: {done}"


def test_running_lanes_go_on_while_a_model_loads(tmp_path, layout):
    models = {"running": FakeModel(num_layers=2)}
    with running(make_config(layout, 1)) as cluster:
        add_models(cluster, models, tmp_path, ("w0",))
        gate = tmp_path / "gate"
        cluster.add_model(FakeModel(load_s=0.2, gate=str(gate)).placement("slow", tmp_path / "slow", ("w0",)))
        lane = LaneDriver(0, "running", [Sequence_((1, 2), 30)])
        run = Run(cluster, [lane])
        run.to_end()
        assert not [event for event in run.events if isinstance(event, ModelReady)], "the load was waited for"
        seen = list(run.events)
        gate.touch()
        (ready,) = wait_for(cluster, ModelReady, seen=seen)
        assert ready.name == "slow"
        assert ready.seconds >= 0.2
        assert ready.bytes_by_rank == {"kv0": 20, "w0": 20}
        progress = [event for event in seen if isinstance(event, LoadProgress) and event.rank == "w0"]
        assert [event.loaded_bytes for event in progress] == sorted(event.loaded_bytes for event in progress)
        assert progress[-1].loaded_bytes == progress[-1].total_bytes == 20


def test_two_models_load_at_the_same_time(tmp_path, layout):
    with running(make_config(layout, 1)) as cluster:
        model = FakeModel(gate=str(tmp_path / "gate"))
        for name in "ab":
            cluster.add_model(model.placement(name, tmp_path / name, ("w0",)))
        seen = []
        while {event.name for event in seen if isinstance(event, LoadProgress)} != {"a", "b"}:
            wait_for(cluster, LoadProgress, seen=seen)
        assert not [event for event in seen if isinstance(event, ModelReady)], "one waited for the other"
        (tmp_path / "gate").touch()
        wait_for(cluster, ModelReady, 2)


def test_a_load_can_be_given_up_and_asked_for_again(tmp_path, layout):
    with running(make_config(layout, 1)) as cluster:
        slow, quick = FakeModel(load_s=30.0), FakeModel(salt=7)
        cluster.add_model(slow.placement("m", tmp_path / "slow", ("w0",)))
        cluster.poll(0.3)
        cluster.remove_model("m")
        cluster.add_model(quick.placement("m", tmp_path / "quick", ("w0",)))
        (ready,) = wait_for(cluster, ModelReady, limit_s=10)
        assert ready.seconds < 10
        lane = LaneDriver(0, "m", [Sequence_((1, 2), 4)])
        Run(cluster, [lane]).to_end()
        check_tokens([lane], {"m": quick}, 1)


def test_a_failed_load_leaves_nothing_and_tells_why(tmp_path, layout):
    with running(make_config(layout, 2)) as cluster:
        before = cluster.memory_bytes()
        bad = FakeModel(failing_ranks=("w1",))
        cluster.add_model(bad.placement("bad", tmp_path / "bad", ("w0", "w1")))
        (failed,) = wait_for(cluster, ModelFailed)
        assert failed.error.startswith("w1: ValueError: ")
        for _ in range(50):
            cluster.poll(0.02)
        until(lambda: cluster.poll(0.0) is not None and cluster.memory_bytes() == before, cluster.memory_bytes)


def test_removing_a_model_gives_its_memory_back(tmp_path, layout):
    with running(make_config(layout, 1)) as cluster:
        before = cluster.memory_bytes()
        add_models(cluster, {"a": FakeModel()}, tmp_path, ("w0",))
        assert cluster.memory_bytes()["w0"] == {"ffn_weights": 1000, "kv_cache": 0}
        assert cluster.memory_bytes()["kv0"]["ffn_weights"] == 0
        cluster.remove_model("a")
        until(lambda: cluster.poll(0.0) is not None and cluster.memory_bytes() == before, cluster.memory_bytes)


def test_a_step_that_raises_fails_for_good_and_others_go_on(tmp_path, layout):
    model = FakeModel(poison_token=666)
    with running(make_config(layout, 1)) as cluster:
        add_models(cluster, {"m": model}, tmp_path, ("w0",))
        cluster.submit(LaneDriver(0, "m", [Sequence_((666,), 1)]).next_step())
        (failed,) = wait_for(cluster, StepFailed)
        assert (failed.lane, failed.step_seq, failed.fatal) == (0, 1, True)
        assert failed.error == "kv0: ValueError: token 666 is poison"
        lane = LaneDriver(0, "m", [Sequence_((1, 2), 4)], step_seq=1)
        Run(cluster, [lane]).to_end()
        check_tokens([lane], {"m": model}, 1)


def test_wake_ends_a_poll_of_another_thread_at_once(tmp_path, layout):
    with running(make_config(layout, 1)) as cluster:
        timer = threading.Timer(0.1, cluster.wake)
        timer.start()
        begun_s = time.monotonic()
        assert cluster.poll(10.0) == []
        assert time.monotonic() - begun_s < 5.0
        timer.join()


def test_an_idle_cluster_sleeps(tmp_path, layout):
    """Measured over a second: threads and processes block, so what is seen is the poll of this test."""
    with running(make_config(layout, 2)) as cluster:
        add_models(cluster, {"m": FakeModel()}, tmp_path, ("w0", "w1"))
        everyone = {os.getpid()} | (set(pids(cluster).values()) if layout == "processes" else set())
        cluster.poll(0.2)
        before_s = {pid: cpu_s(pid) for pid in everyone}
        for _ in range(4):
            assert cluster.poll(0.25) == []
        used = {pid: cpu_s(pid) - before_s[pid] for pid in everyone}
        assert all(seconds <= 0.1 for seconds in used.values()), used


def test_a_rank_that_cannot_start_ends_in_an_error_not_a_loop(layout):
    cluster = start_cluster(make_config(layout, 1, backend="tests.support.no_such_backend", max_failed_starts=2))
    try:
        failed = wait_for(cluster, RankFailed, 2, limit_s=30)
        assert {event.rank for event in failed} == {"kv0", "w0"}
        assert all("no_such_backend" in event.error for event in failed), failed  # the cause, not how its process ended
        cluster.poll(0.3)
        assert cluster.pids() == {}
    finally:
        cluster.close()


def test_a_new_rank_is_ready_with_no_model(layout):
    cluster = start_cluster(make_config(layout, 2))
    try:
        assert {event.rank for event in wait_for(cluster, RankReady, 3)} == {"kv0", "w0", "w1"}
    finally:
        cluster.close()


def test_linear_algebra_keeps_to_its_threads_while_the_cluster_lives(layout):
    """In processes the limit is in their environment; in threads it is this process's, and given back at the end."""

    def num_threads():
        assert np.ones((2, 2)) @ np.ones(2) is not None  # the library is loaded
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    with threadpool_limits(2, "blas"), running(make_config(layout, 1)) as cluster:
        if layout == "processes":
            for pid in pids(cluster).values():
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                assert "OPENBLAS_NUM_THREADS=1" in variables
        else:
            assert num_threads() == {1}
            cluster.close()
        assert num_threads() == {2}
