"""Ranks that die, hang or never start under a cluster in one thread: what is replayed, and what is told."""

import pytest

from crosspool.cluster.base import ModelFailed, RankFailed, RankLost, RankReady, StepFailed
from crosspool.cluster.supervisor import RankState
from tests.support.fake_backend import FakeModel
from tests.support.lane_driver import LaneDriver, Run, Sequence_
from tests.support.stepped_cluster import SteppedCluster
from tests.support.stepped_lanes import add, check_tokens, make_config, make_lanes, run_lanes, until


@pytest.mark.parametrize("seed", range(60))
def test_weights_ranks_that_die_or_hang_cost_replays_and_no_token(tmp_path, seed):
    models = {"a": FakeModel(num_layers=2), "b": FakeModel(num_layers=4, salt=9)}
    stepped = SteppedCluster(make_config(2), seed)
    for name, model in models.items():
        add(stepped, name, model, tmp_path, ("w0", "w1"))
    lanes = make_lanes(3, models, num_tokens=6, is_ahead=seed % 3 != 0)
    faults = [stepped.rng.randrange(5, 80) for _ in range(4)]

    def fault(run):
        faults[:] = [turns - 1 for turns in faults]
        if 0 in faults and not run.away:
            host = stepped.by_rank[stepped.rng.choice(["w0", "w1"])]
            if stepped.rng.random() < 0.5:
                host.die()
            else:
                host.is_frozen = True

    run = run_lanes(stepped, lanes, fault)
    check_tokens(lanes, models, 2)
    lost = [event.rank for event in run.events if isinstance(event, RankLost)]
    assert "kv0" not in lost, "a hung weights rank made its KV rank look guilty"
    assert len(lost) == sum(host.num_launches - 1 for host in stepped.hosts)
    stepped.cluster.close()


@pytest.mark.parametrize("seed", range(40))
def test_a_lost_kv_rank_fails_its_steps_and_serves_again_from_an_empty_cache(tmp_path, seed):
    model = FakeModel(num_layers=3)
    stepped = SteppedCluster(make_config(2), seed)
    add(stepped, "a", model, tmp_path, ("w0", "w1"))
    lanes = make_lanes(2, {"a": model}, num_tokens=6, is_ahead=seed % 3 != 0)
    when = [stepped.rng.randrange(5, 60)]
    is_hang = seed % 2 == 1

    def fault(run):
        when[0] -= 1
        if when[0] == 0:
            host = stepped.by_rank["kv0"]
            host.is_frozen, host.is_alive = is_hang, is_hang

    run = run_lanes(stepped, lanes, fault)
    check_tokens(lanes, {"a": model}, 2)
    lost = [event.rank for event in run.events if isinstance(event, RankLost)]
    failed = [event for event in run.events if isinstance(event, StepFailed)]
    assert lost in ([], ["kv0"])
    assert bool(failed) <= bool(lost)
    assert all(event.waiting_on == ("kv0",) for event in failed)
    stepped.cluster.close()


def test_lanes_of_other_ranks_go_on_while_one_is_away(tmp_path):
    models = {"a": FakeModel(num_layers=2), "b": FakeModel(num_layers=2, salt=3)}
    stepped = SteppedCluster(make_config(2, max_failed_starts=1000), 1)
    add(stepped, "a", models["a"], tmp_path, ("w0",))
    add(stepped, "b", models["b"], tmp_path, ("w1",))
    stepped.by_rank["w0"].dies_at_launch = True
    stepped.by_rank["w0"].die()
    until(stepped, RankLost)
    (lane,) = make_lanes(1, {"b": models["b"]}, num_tokens=8)
    lane.weights_ranks = ("w1",)
    run_lanes(stepped, [lane])
    check_tokens([lane], models, 1)
    assert lane.num_replays == 0
    assert stepped.cluster.states()["w0"] is not RankState.READY
    stepped.cluster.close()


def test_a_step_for_a_rank_that_is_away_fails_at_once(tmp_path):
    model = FakeModel()
    stepped = SteppedCluster(make_config(1), 0)
    add(stepped, "a", model, tmp_path, ("w0",))
    stepped.by_rank["w0"].die()
    until(stepped, RankLost)
    (lane,) = make_lanes(1, {"a": model})
    stepped.cluster.submit(lane.next_step())
    (failed,) = [event for event in stepped.cluster.poll(0) if isinstance(event, StepFailed)]
    assert failed.waiting_on == ("w0",)
    assert not failed.fatal
    stepped.cluster.close()


def a_step_under_way(tmp_path):
    """(cluster, kv0, w0): of a model of one layer, submitted, before either rank has turned."""
    model = FakeModel(num_layers=1)
    stepped = SteppedCluster(make_config(1), 0)
    add(stepped, "a", model, tmp_path, ("w0",))
    (lane,) = make_lanes(1, {"a": model})
    stepped.cluster.submit(lane.next_step())
    kv, weights = stepped.by_rank["kv0"], stepped.by_rank["w0"]
    return stepped, kv, weights


def test_a_step_whose_kv_rank_had_finished_is_done_although_a_weights_rank_died(tmp_path):
    """The KV rank's word decides: its sequences have moved on, so the step must not be replayed."""
    stepped, kv, weights = a_step_under_way(tmp_path)
    weights_moves = [weights.turn(stepped.rng) for _ in range(50)]
    assert any(weights_moves)
    for _ in range(50):
        kv.turn(stepped.rng)
        weights.turn(stepped.rng)
    weights.die()  # the result lies in kv0's outbox
    events = stepped.cluster.poll(0) + stepped.cluster.poll(0)
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["StepDone", "RankLost"]
    stepped.cluster.close()


def test_a_rank_that_did_its_part_and_sleeps_is_not_taken_for_hung_with_the_one_that_is(tmp_path):
    stepped, kv, weights = a_step_under_way(tmp_path)
    while not weights._loops["w0"].is_busy or not kv._loops["kv0"].is_busy:
        kv.turn(stepped.rng)
        weights.turn(stepped.rng)
    while weights._loops["w0"].is_busy:
        weights.turn(stepped.rng)
    kv.is_frozen = True
    events = until(stepped, RankReady)
    assert [event.rank for event in events if isinstance(event, RankLost)] == ["kv0"]
    assert weights.num_launches == 1
    stepped.cluster.close()


def test_a_rank_that_never_starts_is_given_up_and_told_once(tmp_path):
    stepped = SteppedCluster(make_config(2, max_failed_starts=3), 0)
    models = {"a": FakeModel(), "b": FakeModel(salt=2)}
    add(stepped, "a", models["a"], tmp_path, ("w0",))
    add(stepped, "b", models["b"], tmp_path, ("w1",))
    stepped.by_rank["w0"].dies_at_launch = True
    stepped.by_rank["w0"].die()
    events = until(stepped, RankFailed)
    assert stepped.by_rank["w0"].num_launches == 1 + 3
    for _ in range(100):
        stepped.turn()
        events += stepped.cluster.poll(0)
    assert len([event for event in events if isinstance(event, RankFailed)]) == 1
    assert stepped.cluster.states()["w0"] is RankState.FAILED
    stepped.cluster.submit(LaneDriver(0, "a", [Sequence_((1,), 1)]).next_step())
    (failed,) = stepped.cluster.poll(0)
    assert failed.fatal
    assert "could not be brought back" in failed.error
    lane = LaneDriver(1, "b", [Sequence_((1, 2), 3)])
    run_lanes(stepped, [lane])
    check_tokens([lane], models, 1)
    stepped.cluster.add_model(models["a"].placement("late", tmp_path / "late", ("w0",)))
    (late,) = stepped.cluster.poll(0)
    assert isinstance(late, ModelFailed)
    assert late.is_loss
    stepped.cluster.close()


def test_ranks_that_share_a_host_are_lost_together(tmp_path):
    model = FakeModel()
    stepped = SteppedCluster(make_config(3, hosts=(("w0", "w2"),)), 4)
    add(stepped, "a", model, tmp_path, ("w0", "w1", "w2"))
    stepped.by_rank["w2"].die()
    events = until(stepped, RankLost)
    assert {event.rank for event in events if isinstance(event, RankLost)} == {"w0", "w2"}
    lane = LaneDriver(0, "a", [Sequence_((1, 2), 5)])
    run = Run(stepped.cluster, [lane])
    run.away = {"w0", "w2"}
    for _ in range(5000):
        run.turn(0)
        stepped.turn()
        if lane.is_done:
            break
    check_tokens([lane], {"a": model}, 3)
    stepped.cluster.close()
