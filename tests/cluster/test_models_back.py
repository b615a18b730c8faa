"""A rank that comes back loads its models one after another, wanted ones first, and serves each from then on."""

import pytest

from crosspool.cluster.base import ModelBack, RankLost, RankReady, StepFailed
from crosspool.cluster.roster import Roster
from tests.support.fake_backend import FakeModel
from tests.support.lane_driver import LaneDriver, Sequence_
from tests.support.stepped_cluster import SteppedCluster
from tests.support.stepped_lanes import add, check_tokens, make_config, run_lanes, until

MODELS = {name: FakeModel(salt=salt) for salt, name in enumerate("abc")}


@pytest.fixture
def lost(tmp_path):
    """A cluster whose w0 is back and wants to load, and the loads that it has begun: name and what runs them."""
    stepped = SteppedCluster(make_config(1), 4)
    for name, model in MODELS.items():
        add(stepped, name, model, tmp_path, ("w0",))
    held = []
    stepped.by_rank["w0"].start = lambda run, name: held.append((name, run))
    stepped.cluster.load_first(["c", "b"])
    stepped.by_rank["w0"].die()
    until(stepped, RankLost)
    settle(stepped)
    yield stepped, held
    stepped.cluster.close()


def settle(stepped):
    """Events of many turns."""
    events = []
    for _ in range(60):
        stepped.turn()
        events += stepped.cluster.poll(0)
    return events


def test_one_model_is_read_at_a_time_and_wanted_ones_come_first(lost):
    stepped, held = lost
    begun, events = [], []
    while held:
        assert len(held) == 1
        name, run = held.pop()
        begun.append(name)
        run()
        events += settle(stepped)
    assert begun == ["load-c", "load-b", "load-a"]
    told = [event for event in events if isinstance(event, ModelBack | RankReady)]
    assert [(type(event), getattr(event, "model", None)) for event in told] == [
        (ModelBack, "c"),
        (ModelBack, "b"),
        (RankReady, None),
    ]


def test_a_model_that_is_back_is_served_while_the_rank_loads_others(lost):
    stepped, held = lost
    held.pop()[1]()
    until(stepped, ModelBack)
    lane = LaneDriver(0, "c", [Sequence_((1, 2, 3), 6)])
    run_lanes(stepped, [lane])
    check_tokens([lane], MODELS, 1)
    assert [name for name, _ in held] == ["load-b"]  # it has not loaded it yet
    stepped.cluster.submit(LaneDriver(1, "b", [Sequence_((1, 2), 3)]).next_step())
    (failed,) = [event for event in stepped.cluster.poll(0) if isinstance(event, StepFailed)]
    assert (failed.waiting_on, failed.error) == (("w0",), "w0 is away")


def test_what_is_wanted_may_change_between_two_loads(lost):
    stepped, held = lost
    stepped.cluster.load_first(["a"])
    held.pop()[1]()
    settle(stepped)
    assert [name for name, _ in held] == ["load-a"]


def test_a_model_that_is_removed_while_it_is_read_lets_the_next_one_in(lost):
    stepped, held = lost
    stepped.cluster.remove_model("c")
    settle(stepped)
    assert [name for name, _ in held] == ["load-c", "load-b"]


def test_the_next_load_begins_once_all_bytes_of_the_one_before_are_there(tmp_path):
    roster = Roster()
    for name, model in MODELS.items():
        roster.add(model.placement(name, tmp_path / name, ("w0",)), 0.0)
    first = roster.next_load("w0", ())
    assert first is not None
    assert first.placement.name == "a"
    assert roster.next_load("w0", ()) is None
    roster.has_read("a", "w0")  # what it makes of them takes its time
    second = roster.next_load("w0", ("c",))
    assert second is not None
    assert second.placement.name == "c"
    roster.rank_lost("w0")
    assert [roster.next_load("w0", ("b",)).placement.name for _ in "b"] == ["b"]
    assert roster.next_load("w0", ()) is None
