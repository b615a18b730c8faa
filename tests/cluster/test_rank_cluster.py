"""The parent and the loops together, in one thread: every interleaving follows from a seed."""

from dataclasses import replace

import pytest

from crosspool.cluster.base import ModelFailed, RankLost, StepFailed
from crosspool.cluster.messages import OpenChannels
from crosspool.cluster.region import ArrayRegion
from tests.support.fake_backend import FakeModel
from tests.support.lane_driver import LaneDriver, Sequence_
from tests.support.stepped_cluster import SteppedCluster
from tests.support.stepped_lanes import add, check_tokens, make_config, make_lanes, run_lanes, until


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


def test_a_model_whose_channels_find_no_memory_fails_alone_and_comes_once_they_do(tmp_path, monkeypatch):
    models = {"a": FakeModel(), "wider": FakeModel(num_layers=3, salt=5, hidden_size=12)}
    stepped = SteppedCluster(make_config(2), 4)
    add(stepped, "a", models["a"], tmp_path, ("w0", "w1"))
    open_region, asked = stepped.cluster._channels._open_region, []

    def refuse_the_second(num_bytes):
        asked.append(num_bytes)
        if len(asked) == 2:
            raise OSError("Too many open files")
        return open_region(num_bytes)

    monkeypatch.setattr(stepped.cluster._channels, "_open_region", refuse_the_second)
    stepped.cluster.add_model(models["wider"].placement("wider", tmp_path / "wider", ("w0", "w1")))
    (failed,) = [event for event in until(stepped, ModelFailed) if isinstance(event, ModelFailed)]
    told = ("wider", "no memory for its channels: Too many open files", True)
    assert (failed.name, failed.error, failed.is_loss) == told
    add(stepped, "wider", models["wider"], tmp_path, ("w0", "w1"))
    lanes = [LaneDriver(lane, name, [Sequence_(tuple(range(60)), 2)]) for lane, name in enumerate(models)]
    run_lanes(stepped, lanes)
    check_tokens(lanes, models, 2)
    stepped.cluster.close()


def test_a_region_that_cannot_be_sent_is_let_go_of(tmp_path, monkeypatch):
    stepped = SteppedCluster(make_config(1), 5)
    cluster, opened, closed = stepped.cluster, [], []

    class Counted(ArrayRegion):
        def close(self):
            closed.append(self)

    def open_region(num_bytes):
        opened.append(Counted(num_bytes))
        return opened[-1]

    def refuse(rank, message):
        if isinstance(message, OpenChannels):
            raise OSError("Too many open files")

    monkeypatch.setattr(cluster._channels, "_open_region", open_region)
    monkeypatch.setattr(cluster._channels, "_send", refuse)
    cluster.add_model(FakeModel().placement("a", tmp_path / "a", ("w0",)))
    monkeypatch.undo()
    assert len(opened) == 1
    assert closed == opened
    assert [event.name for event in until(stepped, ModelFailed) if isinstance(event, ModelFailed)] == ["a"]
    cluster.close()


def test_a_further_lane_and_a_wider_model_open_their_own_channels(tmp_path):
    stepped = SteppedCluster(make_config(1, num_lanes=1), 2)
    models = {"narrow": FakeModel(hidden_size=4), "wide": FakeModel(hidden_size=64)}
    for name, model in models.items():
        add(stepped, name, model, tmp_path, ("w0",))
    lanes = [LaneDriver(lane, name, [Sequence_((5, 6, 7), 5)]) for lane, name in ((0, "wide"), (7, "narrow"))]
    run_lanes(stepped, lanes)
    check_tokens(lanes, models, 1)
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
        stepped.cluster.submit(replace(step, header=step.header._replace(**change)))
    stepped.cluster.submit(step)
    stepped.cluster.submit(replace(step, header=step.header._replace(step_seq=3)))
    for step_seq in (1, 2, 3, 4):
        with pytest.raises(ValueError, match="lane 0 of kv0 still runs step 1 and 3"):
            stepped.cluster.submit(replace(step, header=step.header._replace(step_seq=step_seq)))
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
