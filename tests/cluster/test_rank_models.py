"""The models of a rank: loads, what is removed, and what it reports of its memory."""

from functools import partial

import pytest

from crosspool.cluster import messages
from crosspool.cluster.loading import Loader
from crosspool.cluster.messages import LoadFailed, StepEnded
from tests.support.fake_backend import FakeModel
from tests.support.rank_rig import KVRig, ScriptedAttention


@pytest.fixture
def make_rig(tmp_path):
    return partial(KVRig, tmp_path / "m")


def test_forget_remove_and_memory_reach_the_worker(make_rig):
    rig = make_rig()
    rig.loop.handle(messages.Forget((4, 5)))
    assert rig.worker.forgotten == [4, 5]
    rig.step(0)
    rig.spin()
    rig.loop.handle(messages.RemoveModel("m"))
    assert rig.worker.models == set()
    assert rig.said[-1].bytes_by_kind["attention_weights"] == 0
    assert StepEnded(0, 1) in rig.said, "a step of a removed model does not run on"
    rig.loop.handle(messages.RemoveModel("m"))


def test_a_load_that_fails_is_told_in_one_line(make_rig, tmp_path):
    rig = make_rig()
    rig.worker.add_model = lambda placement, progress: (_ for _ in ()).throw(FileNotFoundError("no\n  such file"))
    rig.loop.handle(messages.AddModel(FakeModel().placement("n", tmp_path / "n", ("w0",)), 2))
    rig.loop.advance()
    assert rig.said[-1] == LoadFailed("n", 2, "FileNotFoundError: no such file")


def test_a_load_given_up_when_all_but_done_is_removed_before_the_next_of_its_name(tmp_path):
    worker, started = ScriptedAttention(), []
    loader = Loader(worker, lambda run, name: started.append(run), lambda: None)
    placement = FakeModel().placement("m", tmp_path / "m", ("w0",))
    loader.add(messages.AddModel(placement, 1))
    started[0]()
    assert worker.models == {"m"}
    assert loader.cancel("m")
    loader.add(messages.AddModel(placement, 2))
    assert len(started) == 1, "two loads of one name do not overlap"
    outcomes = loader.outcomes()
    assert [type(outcome).__name__ for outcome in outcomes] == ["Loading", "LoadFailed"]
    assert worker.models == set()
    started[1]()
    assert [outcome.load_id for outcome in loader.outcomes()] == [2, 2]
    assert worker.models == {"m"}
    assert not loader.is_busy


def test_a_load_that_is_cancelled_under_way_ends_at_its_next_progress(tmp_path):
    worker, started = ScriptedAttention(), []
    loader = Loader(worker, lambda run, name: started.append(run), lambda: None)
    loader.add(messages.AddModel(FakeModel().placement("m", tmp_path / "m", ("w0",)), 1))
    loader.cancel_all()
    started[0]()
    (failed,) = loader.outcomes()
    assert isinstance(failed, LoadFailed)
    assert worker.models == set()
    assert not loader.cancel("m")
