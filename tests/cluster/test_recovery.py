"""Real processes killed (SIGKILL) and stopped (SIGSTOP) at random points: no accepted request is lost."""

import os
import random
import re
import signal
import time

import pytest

from crosspool.cluster.base import ModelFailed, RankFailed, RankLost, RankReady, StepFailed
from crosspool.cluster.process_host import Spawner
from tests.support.fake_backend import FakeModel, expected_tokens
from tests.support.lane_driver import LaneDriver, Run, Sequence_, wait_for
from tests.support.real_cluster import add_models, children, is_running, make_config, pids, running

DEADLINE_S = 1.0
MODELS = {
    "a": FakeModel(num_layers=2, max_delay_s=2e-3),
    "b": FakeModel(num_layers=5, salt=3, max_delay_s=2e-3),
    "c": FakeModel(num_layers=3, salt=7, hidden_size=16, max_delay_s=1e-3),
}


class Saboteur:
    """Kills or stops a rank's process at random moments, one round after the other, once all ranks are ready again."""

    def __init__(self, cluster, ranks, signals, num_rounds, seed):
        self.cluster = cluster
        self.ranks = ranks
        self.signals = signals
        self.rng = random.Random(seed)
        self.num_left = num_rounds
        self.at_s = 0.0
        self.hurt = None  # until it is ready again; a stopped idle rank is found by the next step that needs it
        self.hit = []

    def __call__(self, events):
        if any(isinstance(event, RankReady) and event.rank == self.hurt for event in events):
            self.hurt = None
            self.at_s = time.monotonic() + self.rng.uniform(0.0, 0.03)
        if self.num_left and self.hurt is None and time.monotonic() >= self.at_s:
            self.hurt, kind = self.rng.choice(self.ranks), self.rng.choice(self.signals)
            os.kill(pids(self.cluster)[self.hurt], kind)
            self.hit.append((self.hurt, kind))
            self.num_left -= 1


def endless_lanes(step_seqs):
    names = list(MODELS)
    lanes = [
        LaneDriver(n, names[n], [Sequence_((n, 1, 2), 12), Sequence_((n, 5), 9)], is_ahead=n > 0) for n in range(3)
    ]
    for lane in lanes:
        lane.step_seq = step_seqs.get(lane.lane, 0)
    return lanes


def sabotage(cluster, ranks, signals, num_rounds, seed, limit_s):
    """Batches of requests of three models, one after the other, until the rounds are through and all have ended."""
    saboteur = Saboteur(cluster, ranks, signals, num_rounds, seed)
    step_seqs, events, away = {}, [], set()
    until_s = time.monotonic() + limit_s
    while saboteur.num_left or saboteur.hurt or not events:
        lanes = endless_lanes(step_seqs)
        run = Run(cluster, lanes)
        run.away = away
        while not all(lane.is_done for lane in lanes) or run.away:
            assert time.monotonic() < until_s, f"{saboteur.num_left} rounds left; {run.away}; {events[-4:]}"
            seen = len(run.events)
            run.turn(0.002)
            saboteur(run.events[seen:])
        for lane in lanes:
            step_seqs[lane.lane] = lane.step_seq
            for sequence in lane.sequences:
                expected = expected_tokens(MODELS[lane.model], sequence.prompt, sequence.num_tokens, 2)
                assert sequence.outputs == expected, f"lane {lane.lane} after {saboteur.hit}"
        events += run.events
        away = run.away
    return saboteur, events


@pytest.mark.parametrize(
    ("num_rounds", "seed"),
    [(20, 1), pytest.param(200, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_weights_ranks_killed_or_stopped_at_random_points_cost_no_token(tmp_path, num_rounds, seed):
    with running(make_config("processes", 2, step_deadline_s=DEADLINE_S)) as cluster:
        add_models(cluster, MODELS, tmp_path, ("w0", "w1"))
        signals = [signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]
        saboteur, events = sabotage(cluster, ["w0", "w1"], signals, num_rounds, seed, limit_s=5.0 * num_rounds)
        lost = [event.rank for event in events if isinstance(event, RankLost)]
        assert lost == [rank for rank, _ in saboteur.hit], "every loss is told, and nobody else was taken for hung"


@pytest.mark.parametrize(
    ("num_rounds", "seed"),
    [(8, 3), pytest.param(200, 4, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
def test_kv_ranks_killed_or_stopped_at_random_points_are_prefilled_again(tmp_path, num_rounds, seed):
    with running(make_config("processes", 2, step_deadline_s=DEADLINE_S)) as cluster:
        add_models(cluster, MODELS, tmp_path, ("w0", "w1"))
        signals = [signal.SIGKILL, signal.SIGSTOP]
        saboteur, events = sabotage(cluster, ["kv0", "kv0", "w1"], signals, num_rounds, seed, limit_s=5.0 * num_rounds)
        lost = [event.rank for event in events if isinstance(event, RankLost)]
        assert lost == [rank for rank, _ in saboteur.hit]


@pytest.mark.parametrize("rank", ["w0", "kv0"])
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_loss_is_told_in_time_and_the_rank_comes_back_alone(tmp_path, rank, kind):
    """A rank that was killed is missed at once, far below a deadline; one that was stopped after 1.5 of them."""
    model = FakeModel(num_layers=50, max_delay_s=20e-3)
    is_killed = kind == signal.SIGKILL
    with running(make_config("processes", 2, step_deadline_s=60.0 if is_killed else DEADLINE_S)) as cluster:
        add_models(cluster, {"m": model}, tmp_path, ("w0", "w1"))
        before = pids(cluster)
        cluster.submit(LaneDriver(0, "m", [Sequence_((1, 2), 1)]).next_step())
        cluster.poll(0.05)
        os.kill(before[rank], kind)
        begun_s = time.monotonic()
        seen = []
        (lost,) = wait_for(cluster, RankLost, seen=seen)
        told_s = time.monotonic() - begun_s
        assert lost.rank == rank
        if is_killed:
            assert "SIGKILL" in lost.reason
        else:
            silent_s = float(re.findall(r"gave no sign of life for ([\d.]+) s", lost.reason)[0])
            assert silent_s < 2.5 * DEADLINE_S
        assert told_s < 10.0, f"told after {told_s:.2f} s"
        wait_for(cluster, RankReady, seen=seen)
        failed = [event for event in seen if isinstance(event, StepFailed)]
        assert [(event.lane, event.waiting_on, event.fatal) for event in failed] == [(0, (rank,), False)]
        after = pids(cluster)
        assert {name for name in before if before[name] != after[name]} == {rank}
        assert not is_running(before[rank])
        lane = LaneDriver(0, "m", [Sequence_((1, 2), 2)], step_seq=1)
        Run(cluster, [lane]).to_end()
        assert lane.sequences[0].outputs == expected_tokens(model, (1, 2), 2, 2)
        assert sorted(children()) == sorted(after.values())


def test_a_rank_that_hangs_tells_where_before_it_is_ended(tmp_path, capfd):
    model = FakeModel(num_layers=50, max_delay_s=600.0)
    with running(make_config("processes", 1, step_deadline_s=0.4)) as cluster:
        add_models(cluster, {"m": model}, tmp_path, ("w0",))
        cluster.submit(LaneDriver(0, "m", [Sequence_((1, 2), 1)]).next_step())
        (lost,) = wait_for(cluster, RankLost)
        assert "no sign of life" in lost.reason
    said = capfd.readouterr().err
    assert "Current thread" in said
    assert "fake_backend.py" in said, "the stack does not reach what the rank was doing"


def test_a_lane_on_other_ranks_runs_on_undisturbed(tmp_path):
    models = {"a": FakeModel(num_layers=3), "b": FakeModel(num_layers=3, salt=4, max_delay_s=1e-3)}
    with running(make_config("processes", 2)) as cluster:
        add_models(cluster, {"a": models["a"]}, tmp_path, ("w0",))
        add_models(cluster, {"b": models["b"]}, tmp_path, ("w1",))
        lane = LaneDriver(0, "b", [Sequence_((1, 2), 60)], weights_ranks=("w1",))
        run = Run(cluster, [lane])
        run.turn()
        os.kill(pids(cluster)["w0"], signal.SIGKILL)
        run.to_end()
        assert lane.num_replays == 0
        assert lane.sequences[0].outputs == expected_tokens(models["b"], (1, 2), 60, 1)
        if not [event for event in run.events if isinstance(event, RankLost)]:
            wait_for(cluster, RankLost)  # a busy machine may take longer to end a process than all steps take


def test_a_model_whose_load_ends_its_process_is_dropped_and_the_rest_serves_on(tmp_path):
    good, bad = FakeModel(), FakeModel(crashing_ranks=("w1",))
    with running(make_config("processes", 2)) as cluster:
        add_models(cluster, {"good": good}, tmp_path, ("w0", "w1"))
        cluster.add_model(bad.placement("bad", tmp_path / "bad", ("w0", "w1")))
        seen = []
        (failed,) = wait_for(cluster, ModelFailed, seen=seen)
        assert (failed.error, failed.is_loss) == ("w1 was lost while it loaded: exit code 7", True)
        lane = LaneDriver(0, "good", [Sequence_((1, 2), 4)])
        run = Run(cluster, [lane])
        run.away = {event.rank for event in seen if isinstance(event, RankLost)}
        run.to_end()
        assert lane.sequences[0].outputs == expected_tokens(good, (1, 2), 4, 2)


def test_an_idle_rank_that_was_stopped_is_found_by_the_first_step_that_needs_it(tmp_path):
    model = FakeModel()
    with running(make_config("processes", 1, step_deadline_s=DEADLINE_S)) as cluster:
        add_models(cluster, {"m": model}, tmp_path, ("w0",))
        os.kill(pids(cluster)["w0"], signal.SIGSTOP)
        assert cluster.poll(2.5 * DEADLINE_S) == []
        lane = LaneDriver(0, "m", [Sequence_((1, 2), 4)])
        run = Run(cluster, [lane])
        run.to_end()
        assert lane.num_replays == 1
        assert lane.sequences[0].outputs == expected_tokens(model, (1, 2), 4, 1)


def test_a_slow_rank_that_works_is_not_taken_for_hung(tmp_path):
    """Fifty layers of up to 50 ms are more than the deadline together; each wait by itself is not."""
    model = FakeModel(num_layers=50, max_delay_s=50e-3)
    with running(make_config("processes", 1, step_deadline_s=DEADLINE_S)) as cluster:
        add_models(cluster, {"m": model}, tmp_path, ("w0",))
        lane = LaneDriver(0, "m", [Sequence_((1, 2), 1)])
        run = Run(cluster, [lane])
        run.to_end()
        assert lane.num_replays == 0
        assert not [event for event in run.events if isinstance(event, RankLost)]


def test_a_process_that_the_system_refuses_to_start_is_tried_again(tmp_path, monkeypatch):
    model = FakeModel()
    with running(make_config("processes", 1)) as cluster:
        add_models(cluster, {"m": model}, tmp_path, ("w0",))
        refusals = [OSError("Cannot allocate memory"), OSError("Too many open files")]
        start = Spawner.start

        def refuse_first(*args):
            if refusals:
                raise refusals.pop(0)
            return start(*args)

        monkeypatch.setattr(Spawner, "start", refuse_first)
        os.kill(pids(cluster)["w0"], signal.SIGKILL)
        seen = []
        wait_for(cluster, RankReady, seen=seen)
        reasons = [event.reason for event in seen if isinstance(event, RankLost)]
        assert reasons == [
            "killed by SIGKILL",
            "cannot be started: Cannot allocate memory",
            "cannot be started: Too many open files",
        ]
        lane = LaneDriver(0, "m", [Sequence_((1, 2), 3)])
        Run(cluster, [lane]).to_end()
        assert lane.sequences[0].outputs == expected_tokens(model, (1, 2), 3, 1)


def test_ranks_of_a_team_that_takes_nobody_back_are_given_up_with_the_reason(tmp_path):
    """The backend here has no channels of that kind: what is tested is the way back."""
    with running(make_config("processes", 1, transport="nvshmem")) as cluster:
        add_models(cluster, {"m": FakeModel()}, tmp_path, ("w0",))
        os.kill(pids(cluster)["w0"], signal.SIGKILL)
        seen = []
        (failed,) = wait_for(cluster, RankFailed, seen=seen)
        reasons = [event.reason for event in seen if isinstance(event, RankLost)]
        assert reasons[0] == "killed by SIGKILL"
        assert len(reasons) > 1
        assert all("NVSHMEM takes no rank back into its team" in reason for reason in (*reasons[1:], failed.error))
