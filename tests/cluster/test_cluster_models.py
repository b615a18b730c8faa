"""Models that come and go, fail to load or are gone, on a cluster in one thread."""

import itertools

import pytest

from crosspool.cluster.base import LoadProgress, ModelFailed, ModelReady, RankReady
from tests.support.fake_backend import FakeModel
from tests.support.lane_driver import LaneDriver, Sequence_
from tests.support.stepped_cluster import SteppedCluster
from tests.support.stepped_lanes import add, check_tokens, make_config, run_lanes, until


def test_a_failed_load_on_one_rank_removes_the_model_from_all(tmp_path):
    stepped = SteppedCluster(make_config(2), 0)
    good = FakeModel()
    add(stepped, "good", good, tmp_path, ("w0", "w1"))
    before = stepped.cluster.memory_bytes()
    stepped.cluster.add_model(FakeModel(failing_ranks=("w1",)).placement("bad", tmp_path / "bad", ("w0", "w1")))
    events = until(stepped, ModelFailed)
    (failed,) = [event for event in events if isinstance(event, ModelFailed)]
    assert failed.name == "bad"
    assert failed.error.startswith("w1: ValueError: ")
    for _ in range(200):
        stepped.turn()
        stepped.cluster.poll(0)
    assert stepped.cluster.memory_bytes() == before
    add(stepped, "bad", FakeModel(salt=4), tmp_path, ("w0", "w1"))  # the name is free again
    stepped.cluster.close()


def test_models_come_and_go_while_others_run(tmp_path):
    stepped = SteppedCluster(make_config(2, num_lanes=1), 5)
    models = {"a": FakeModel(num_layers=2)}
    add(stepped, "a", models["a"], tmp_path, ("w0", "w1"))
    lane = LaneDriver(0, "a", [Sequence_((1, 2), 30)])
    turns = itertools.count()

    def churn(run):
        turn = next(turns)
        if turn % 40 == 0:
            wider = FakeModel(hidden_size=8 + 4 * (turn // 40 + 1), salt=turn)
            stepped.cluster.add_model(wider.placement("guest", tmp_path / f"guest{turn}", ("w1",)))
        elif turn % 40 == 39:
            stepped.cluster.remove_model("guest")

    run = run_lanes(stepped, [lane], churn)
    check_tokens([lane], models, 2)
    assert lane.num_replays == 0
    assert len([event for event in run.events if isinstance(event, ModelReady)]) >= 1
    assert [event for event in run.events if isinstance(event, LoadProgress)]
    stepped.cluster.close()


def test_a_restarted_rank_reloads_from_disk_and_a_model_that_is_gone_there_fails(tmp_path):
    stepped = SteppedCluster(make_config(1), 0)
    models = {"a": FakeModel(), "b": FakeModel(salt=2)}
    for name, model in models.items():
        add(stepped, name, model, tmp_path, ("w0",))
    (tmp_path / "a" / "fake.json").unlink()
    stepped.by_rank["w0"].die()
    events = until(stepped, RankReady)
    assert [event.name for event in events if isinstance(event, ModelFailed)] == ["a"]
    lane = LaneDriver(1, "b", [Sequence_((1, 2), 3)])
    run_lanes(stepped, [lane])
    check_tokens([lane], models, 1)
    stepped.cluster.close()


def test_a_wrong_placement_is_refused_by_name(tmp_path):
    stepped = SteppedCluster(make_config(1), 0)
    model = FakeModel()
    add(stepped, "a", model, tmp_path, ("w0",))
    for ranks, kv_rank, message in (
        (("w0",), "kv0", "model a is already placed"),
        (("w7",), "kv0", "'w7', which is none of w0"),
        (("w0",), "w0", "'w0', which is none of kv0"),
        ((), "kv0", "name each rank once"),
    ):
        with pytest.raises(ValueError, match=message):
            stepped.cluster.add_model(model.placement("a", tmp_path / "a", ranks, kv_rank))
    stepped.cluster.close()
