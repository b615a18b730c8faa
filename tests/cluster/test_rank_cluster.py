"""The parent and the loops together, in one thread: every interleaving follows from a seed."""

import itertools
from dataclasses import replace

import pytest

from crosspool.cluster.base import LoadProgress, ModelFailed, ModelReady, RankFailed, RankLost, RankReady, StepFailed
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.supervisor import RankState
from tests.support.fake_backend import FakeModel, expected_tokens
from tests.support.lane_driver import LaneDriver, Run, Sequence_
from tests.support.stepped_cluster import SteppedCluster

BACKEND = "tests.support.fake_backend"


def make_config(num_weights_ranks, **changes):
    fields = dict(
        layout="inprocess",
        weights_ranks=tuple(f"w{idx}" for idx in range(num_weights_ranks)),
        backend=BACKEND,
        num_frames=2,
        frame_bytes=4096,
        max_tokens_per_step=64,
        step_deadline_s=5.0,
    )
    return ClusterConfig(**(fields | changes))


def until(stepped, kind, most=20_000):
    """Events up to the first one of `kind`."""
    events = []
    for _ in range(most):
        events += stepped.cluster.poll(0)
        if any(isinstance(event, kind) for event in events):
            return events
        stepped.turn()
    raise AssertionError(f"no {kind} among {events}")


def add(stepped, name, model, directory, ranks, kv_rank="kv0"):
    stepped.cluster.add_model(model.placement(name, directory / name, ranks, kv_rank))
    return until(stepped, ModelReady)


def run_lanes(stepped, lanes, between=lambda run: None, most=40_000):
    run = Run(stepped.cluster, lanes)
    for _ in range(most):
        between(run)
        run.turn(timeout_s=0)
        if all(lane.is_done for lane in lanes):
            return run
        stepped.turn()
    raise AssertionError(f"lanes do not end: {lanes}; last events {run.events[-5:]}")


def check_tokens(lanes, models, num_weights_ranks):
    for lane in lanes:
        for sequence in lane.sequences:
            model = models[lane.model]
            expected = expected_tokens(model, sequence.prompt, sequence.num_tokens, num_weights_ranks)
            assert sequence.outputs == expected, f"lane {lane.lane}, prompt {sequence.prompt}"


def make_lanes(num_lanes, models, num_tokens=4, num_sequences=2, is_ahead=False):
    names = itertools.cycle(models)
    return [
        LaneDriver(
            lane,
            next(names),
            [Sequence_(tuple(range(lane + 3 + idx)), num_tokens) for idx in range(num_sequences)],
            priority=lane % 2,
            is_ahead=is_ahead,
        )
        for lane in range(num_lanes)
    ]


@pytest.mark.parametrize("order", ["none", "ticket", "priority"])
@pytest.mark.parametrize("num_lanes", [1, 2, 4])
@pytest.mark.parametrize("num_weights_ranks", [1, 2, 3])
def test_every_interleaving_gives_the_undivided_tokens(tmp_path, num_weights_ranks, num_lanes, order):
    models = {"shallow": FakeModel(num_layers=1), "odd": FakeModel(num_layers=3, salt=5, hidden_size=12)}
    for seed in range(8):
        stepped = SteppedCluster(make_config(num_weights_ranks, order=order), seed)
        for name, model in models.items():
            add(stepped, name, model, tmp_path, stepped.cluster._config.weights_ranks)
        lanes = make_lanes(num_lanes, models, is_ahead=seed % 2 == 1)
        run = run_lanes(stepped, lanes)
        assert bool(run.num_behind) == (seed % 2 == 1)
        check_tokens(lanes, models, num_weights_ranks)
        assert not [event for event in run.events if isinstance(event, StepFailed)]
        stepped.cluster.close()


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


def test_a_step_whose_kv_rank_had_finished_is_done_although_a_weights_rank_died(tmp_path):
    """The KV rank's word decides: its sequences have moved on, so the step must not be replayed."""
    model = FakeModel(num_layers=1)
    stepped = SteppedCluster(make_config(1), 0)
    add(stepped, "a", model, tmp_path, ("w0",))
    (lane,) = make_lanes(1, {"a": model})
    stepped.cluster.submit(lane.next_step())
    kv, weights = stepped.by_rank["kv0"], stepped.by_rank["w0"]
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
    model = FakeModel(num_layers=1)
    stepped = SteppedCluster(make_config(1), 0)
    add(stepped, "a", model, tmp_path, ("w0",))
    (lane,) = make_lanes(1, {"a": model})
    stepped.cluster.submit(lane.next_step())
    kv, weights = stepped.by_rank["kv0"], stepped.by_rank["w0"]
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


def test_a_step_that_fails_on_its_kv_rank_ends_on_the_others(tmp_path):
    """One weights rank is busy with other things for longer than the deadline: nobody is killed for it."""
    model = FakeModel(num_layers=2)
    stepped = SteppedCluster(make_config(2), 0)
    add(stepped, "a", model, tmp_path, ("w0", "w1"))
    (lane,) = make_lanes(1, {"a": model})
    stepped.cluster.submit(lane.next_step())
    busy = stepped.by_rank["w0"]
    busy.turn = lambda rng: bool(busy._board.set_beat(busy._host, busy._board.beat(busy._host) + 1))
    events = until(stepped, StepFailed)
    assert [(event.waiting_on, event.fatal) for event in events if isinstance(event, StepFailed)] == [(("w0",), False)]
    for _ in range(5):
        stepped.turn()
        events += stepped.cluster.poll(0)
    assert not stepped.by_rank["w1"]._loops["w1"].is_busy
    assert not [event for event in events if isinstance(event, RankLost)]
    del busy.turn
    lane.failed(1)
    run_lanes(stepped, [lane])
    check_tokens([lane], {"a": model}, 2)
    stepped.cluster.close()


def test_an_exception_in_either_half_ends_that_step_only(tmp_path):
    model = FakeModel(poison_token=666, poison_num_tokens=13)
    stepped = SteppedCluster(make_config(2), 3)
    add(stepped, "a", model, tmp_path, ("w0", "w1"))
    bad_token = LaneDriver(0, "a", [Sequence_((1, 666), 3)])
    bad_size = LaneDriver(1, "a", [Sequence_(tuple(range(13)), 3)])
    good = LaneDriver(2, "a", [Sequence_((1, 2, 3), 6)])
    stepped.cluster.submit(bad_token.next_step())
    stepped.cluster.submit(bad_size.next_step())
    events = []
    for _ in range(2000):
        events += stepped.cluster.poll(0)
        stepped.turn()
        if len([event for event in events if isinstance(event, StepFailed)]) == 2:
            break
    failed = {event.lane: event for event in events if isinstance(event, StepFailed)}
    assert failed[0].fatal
    assert failed[0].error == "kv0: ValueError: token 666 is poison"
    assert failed[1].fatal
    assert failed[1].error in ("w0: ValueError: 13 tokens are poison", "w1: ValueError: 13 tokens are poison")
    run_lanes(stepped, [good])
    check_tokens([good], {"a": model}, 2)
    stepped.cluster.close()


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


def test_a_further_lane_and_a_wider_model_open_their_own_channels(tmp_path):
    stepped = SteppedCluster(make_config(1, num_lanes=1), 2)
    models = {"narrow": FakeModel(hidden_size=4), "wide": FakeModel(hidden_size=64)}
    for name, model in models.items():
        add(stepped, name, model, tmp_path, ("w0",))
    lanes = [LaneDriver(lane, name, [Sequence_((5, 6, 7), 5)]) for lane, name in ((0, "wide"), (7, "narrow"))]
    run_lanes(stepped, lanes)
    check_tokens(lanes, models, 1)
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
    assert [type(event) for event in stepped.cluster.poll(0)] == [ModelFailed]
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


def test_two_kv_ranks_share_a_weights_rank(tmp_path):
    models = {"a": FakeModel(num_layers=2), "b": FakeModel(num_layers=3, salt=8)}
    stepped = SteppedCluster(make_config(1, kv_ranks=("kv0", "kv1")), 6)
    add(stepped, "a", models["a"], tmp_path, ("w0",), "kv0")
    add(stepped, "b", models["b"], tmp_path, ("w0",), "kv1")
    lanes = [
        LaneDriver(lane, name, [Sequence_((lane, 4), 6)], kv_rank=kv)
        for lane, (name, kv) in enumerate([("a", "kv0"), ("b", "kv1"), ("a", "kv0")])
    ]
    run_lanes(stepped, lanes)
    check_tokens(lanes, models, 1)
    stepped.cluster.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model="nobody"), "no model 'nobody' is placed; there are: a"),
        (dict(num_tokens=65), "more than max_tokens_per_step 64"),
        (dict(kv_rank="kv9"), "a lives on kv0"),
        (dict(prefill_rank="p0"), "step names prefill rank p0, but a lies on no prefill rank"),
    ],
)
def test_a_wrong_step_is_refused_by_name(tmp_path, change, message):
    stepped = SteppedCluster(make_config(1), 0)
    add(stepped, "a", FakeModel(), tmp_path, ("w0",))
    step = LaneDriver(0, "a", [Sequence_((1, 2), 1)]).next_step()
    with pytest.raises(ValueError, match=message):
        stepped.cluster.submit(replace(step, header=replace(step.header, **change)))
    stepped.cluster.submit(step)
    stepped.cluster.submit(replace(step, header=replace(step.header, step_seq=3)))
    for step_seq in (1, 2, 3, 4):
        with pytest.raises(ValueError, match="lane 0 of kv0 still runs step 1 and 3"):
            stepped.cluster.submit(replace(step, header=replace(step.header, step_seq=step_seq)))
    stepped.cluster.close()


def test_a_step_behind_one_that_fails_on_either_side_fails_right_after_it_without_having_run(tmp_path):
    model = FakeModel(poison_token=666, poison_num_tokens=13)
    stepped = SteppedCluster(make_config(2), 3)
    add(stepped, "a", model, tmp_path, ("w0", "w1"))
    for lane, prompt in enumerate(((1, 666), tuple(range(13)))):
        bad = LaneDriver(lane, "a", [Sequence_(prompt, 3)], is_ahead=True)
        stepped.cluster.submit(bad.next_step())
        stepped.cluster.submit(bad.step_behind())
    failed = []
    for _ in range(2000):
        failed += [event for event in stepped.cluster.poll(0) if isinstance(event, StepFailed)]
        stepped.turn()
    for lane in (0, 1):
        first, second = [event for event in failed if event.lane == lane]
        assert (first.step_seq, first.fatal, second.step_seq, second.fatal) == (1, True, 2, False)
        assert second.error == f"kv0: step 1 of lane {lane}, behind which it came, failed"
    assert not any(loop.is_busy for host in stepped.hosts for loop in host._loops.values())
    good = LaneDriver(0, "a", [Sequence_((1, 2, 3), 6)], step_seq=2)
    run_lanes(stepped, [good])
    check_tokens([good], {"a": model}, 2)
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
