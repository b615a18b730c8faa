"""ApartCluster: a process for each model at a rank, which the engine takes for one rank."""

from __future__ import annotations

import os
import signal

import pytest

from crosspool.cluster.apart import ApartCluster, own_rank, told_rank
from crosspool.cluster.base import ModelReady, RankLost, RankReady
from tests.support.fake_backend import FakeModel, expected_tokens
from tests.support.lane_driver import LaneDriver, Run, Sequence_, wait_for
from tests.support.real_cluster import make_config, running

MODELS = {"one": FakeModel(num_layers=2), "two": FakeModel(num_layers=5, salt=3)}
KV, WEIGHTS = ("kv0.0", "kv0.1"), ("w0.0", "w0.1")


@pytest.fixture
def apart():
    hosts = tuple(zip(KV, WEIGHTS, strict=True))
    with running(make_config("processes", kv_ranks=KV, weights_ranks=WEIGHTS, hosts=hosts)) as inner:
        yield ApartCluster(inner, {"kv0": 2, "w0": 2})


def add(cluster, directory, names):
    for name in names:
        cluster.add_model(MODELS[name].placement(name, directory / name, ("w0",)))
    wait_for(cluster, ModelReady, len(names))


def lanes_of(names):
    return [LaneDriver(lane, name, [Sequence_((lane, 1, 2), 9)]) for lane, name in enumerate(names)]


def check(lanes):
    for lane in lanes:
        (sequence,) = lane.sequences
        assert sequence.outputs == expected_tokens(MODELS[lane.model], sequence.prompt, sequence.num_tokens, 1)


def test_names_of_processes_tell_the_rank():
    assert [told_rank(own_rank(rank, slot)) for rank in ("kv0", "w1") for slot in (0, 3)] == ["kv0", "kv0", "w1", "w1"]


def test_each_model_runs_in_a_process_of_its_own(apart, tmp_path):
    add(apart, tmp_path, MODELS)
    lanes = lanes_of(MODELS)
    Run(apart, lanes).to_end()
    check(lanes)
    held = apart.memory_bytes()
    assert all(held[rank] for rank in (*KV, *WEIGHTS)), "a process holds no model"
    apart.forget("kv0", [sequence.sequence_id for lane in lanes for sequence in lane.sequences])


def test_a_model_that_left_makes_room_for_another(apart, tmp_path):
    add(apart, tmp_path, MODELS)
    third = FakeModel().placement("three", tmp_path / "three", ("w0",))
    with pytest.raises(ValueError, match="no process is left for three on"):
        apart.add_model(third)
    apart.remove_model("one")
    apart.add_model(third)
    (ready,) = wait_for(apart, ModelReady)
    assert ready.bytes_by_rank.keys() == {"kv0.0", "w0.0"}


def test_a_lost_process_is_told_as_its_rank(apart, tmp_path):
    add(apart, tmp_path, MODELS)
    os.kill(apart._inner.pids()["kv0.1"], signal.SIGKILL)
    lost = wait_for(apart, RankLost, 2)
    assert {event.rank for event in lost} == {"kv0", "w0"}
    wait_for(apart, RankReady, 2)
    lanes = lanes_of(MODELS)
    for lane in lanes:
        lane.step_seq = 10
    Run(apart, lanes).to_end()
    check(lanes)
