"""One rank's loop by itself: order, deadlines, stale steps, exceptions. The other side of its channels is the test."""

from functools import partial

import numpy as np
import pytest

from crosspool.backends.base import Wait
from crosspool.cluster import messages
from crosspool.cluster.channel import ChannelInlet, ChannelOutlet, a2f_part, f2a_part, link_bytes
from crosspool.cluster.lane_run import TELL_EVERY_S
from crosspool.cluster.loading import Loader, start_now
from crosspool.cluster.messages import LoadFailed, StepEnded, StepFinished
from crosspool.cluster.rank_loop import RankLoop, RankSurroundings
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.work_clock import WorkClock
from crosspool.cluster.worker import RankWorker
from crosspool.core import SampledToken
from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.scheduler.step import StepDescriptor, StepHeader, epoch
from tests.support.fake_backend import FakeFFNWorker, FakeModel

CAPACITY = 64
DEADLINE_S = 5.0


class ScriptedAttention:
    """A KV half that puts one row a layer and waits for the answer; it logs which lane ran."""

    def __init__(self):
        self.log = []
        self.closed = []
        self.num_layers = 3
        self.cost_s = 0.0
        self.clock = None
        self.fails_at = None
        self.forgotten = []
        self.told = {}  # by layer: tokens that its wait tells
        self.nap_s = self.rest_until_s = 0.0
        self.models = set()

    def add_model(self, placement, progress):
        progress(1, 1)
        self.models.add(placement.name)

    def remove_model(self, model):
        self.models.remove(model)

    def memory_bytes(self):
        return {"attention_weights": len(self.models), "kv_cache": 1, "ffn_weights": 0}

    def forget(self, sequence_ids):
        self.forgotten += sequence_ids

    def run(self, step, links):
        header = step.header
        try:
            for layer in range(self.num_layers):
                self.log.append((header.lane, layer))
                self.clock.now_s += self.cost_s
                if self.fails_at == (header.lane, layer):
                    raise RuntimeError("out of\nluck")
                for outlet in links.outlets.values():
                    outlet.put(layer, epoch(header.step_seq, layer), np.ones((1, 8), np.float32))
                told = self.told.get(layer, ())
                yield Wait(
                    tuple(links.inlets.values()), epoch(header.step_seq, layer), told, self.nap_s, self.rest_until_s
                )
            return (header.step_seq,)
        except GeneratorExit:
            self.closed.append((header.lane, header.step_seq))
            raise


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class KVRig:
    """A KV rank's loop with `peers`, whose ends are in the hands of the test."""

    def __init__(self, directory, peers=("w0",), num_lanes=3, order="ticket"):
        self.clock = Clock()
        self.worker = ScriptedAttention()
        self.worker.clock = self.clock
        self.said = []
        self.rung = []
        around = RankSurroundings(
            emit=self.said.append,
            ring=lambda peer: lambda: self.rung.append(peer),
            wake=lambda: None,
            clock=self.clock,
            order=ORDER_POLICIES[order],
            step_deadline_s=DEADLINE_S,
            start=start_now,
        )
        self.loop = RankLoop("kv0", RankWorker(attention_worker=self.worker), around)
        self.out, self.into, self.regions = {}, {}, {}
        self.peers = peers
        self.loop.handle(messages.AddModel(FakeModel().placement("m", directory, peers), 1))
        self.loop.advance()
        for lane in range(num_lanes):
            for peer in peers:
                self.open(lane, peer)
        self.said.clear()

    def open(self, lane, peer):
        self.regions[lane, peer] = region = ArrayRegion(link_bytes(CAPACITY))
        self.out[lane, peer] = ChannelOutlet(f2a_part(region.map(), CAPACITY), CAPACITY, lambda: None)
        self.into[lane, peer] = ChannelInlet(a2f_part(region.map(), CAPACITY), CAPACITY)
        self.loop.handle(messages.OpenChannels(lane, peer, CAPACITY, region))

    def step(self, lane=0, step_seq=1, priority=0, behind=0):
        header = StepHeader(lane=lane, model="m", step_seq=step_seq, phase="decode", num_tokens=1, priority=priority)
        self.loop.handle(messages.Step(StepDescriptor(header=header, rows=()), behind))

    def answer(self, lane, layer, step_seq=1, peers=None):
        for peer in peers or self.peers:
            self.out[lane, peer].put(layer, epoch(step_seq, layer), np.zeros((1, 8), np.float32))

    def spin(self):
        while self.loop.advance():
            pass


@pytest.fixture
def make_rig(tmp_path):
    return partial(KVRig, tmp_path / "m")


def test_a_step_runs_to_its_end_and_counts_work_and_wait_apart(make_rig):
    rig = make_rig()
    rig.worker.cost_s = 0.5
    rig.step()
    for layer in range(3):
        rig.spin()
        assert rig.into[0, "w0"].arrived(epoch(1, layer))
        rig.clock.now_s += 2.0
        rig.answer(0, layer)
    rig.spin()
    (finished,) = rig.said
    assert isinstance(finished, StepFinished)
    assert finished.result.sampled == (1,)
    assert finished.result.attention_s == pytest.approx(1.5)
    assert finished.result.wait_s == pytest.approx(6.0)
    assert rig.rung == ["w0"] * 3
    assert not rig.loop.is_busy


def test_what_a_wait_tells_is_told_once_and_before_the_result(make_rig):
    rig = make_rig()
    rig.worker.told = {1: ((SampledToken(7, 3),),)}
    rig.step()
    for layer in range(3):
        rig.clock.now_s += TELL_EVERY_S
        rig.spin()
        rig.answer(0, layer)
    rig.spin()
    told, finished = rig.said
    assert told == messages.StepTold(0, 1, ((SampledToken(7, 3),),))
    assert isinstance(finished, StepFinished)
    assert finished.told == ()


def test_tokens_of_quick_steps_are_told_together_and_none_late(make_rig):
    rig = make_rig()
    rig.worker.num_layers = 6
    first, second, third, last = [(SampledToken(7, token),) for token in range(4)]
    rig.worker.told = {1: (first,), 2: (second, third), 5: (last,)}
    rig.step()
    for layer in range(6):
        rig.spin()
        assert rig.said == ([] if layer < 3 else [messages.StepTold(0, 1, (first, second, third))])
        rig.answer(0, layer)
        rig.clock.now_s += TELL_EVERY_S / 3
    rig.spin()
    (finished,) = rig.said[1:]
    assert finished.told == (last,)


def test_a_rank_may_nap_only_while_all_its_steps_wait_for_devices(make_rig):
    rig = make_rig()
    assert rig.loop.nap_s() > 1.0, "without steps it asks for nothing"
    rig.worker.nap_s = 5e-4
    rig.step(0)
    assert rig.loop.nap_s() == 0.0, "its first segment is ready"
    rig.spin()
    assert rig.loop.nap_s() == 5e-4
    rig.answer(0, 0)
    rig.worker.rest_until_s = rig.clock.now_s + 0.25
    rig.spin()
    assert rig.loop.nap_s() == 0.25, "the next will hardly have come before"
    rig.clock.now_s += 0.5
    assert rig.loop.nap_s() == 5e-4
    rig.worker.nap_s = 0.0
    rig.step(1)
    rig.spin()
    assert rig.loop.nap_s() == 0.0, "the other lane's peer is a host"


def test_the_weights_ranks_clocks_tell_the_ffn_apart_from_the_transfer(make_rig):
    rig = make_rig(peers=("w0", "w1"))
    rig.worker.cost_s = 0.5
    told = {peer: WorkClock(f2a_part(rig.regions[0, peer].map(), CAPACITY)) for peer in rig.peers}
    for step_seq in (1, 2):
        rig.step(step_seq=step_seq)
        for layer in range(3):
            rig.spin()
            rig.clock.now_s += 2.0
            told["w0"].add(0.5)
            told["w1"].add(0.25)
            rig.answer(0, layer, step_seq)
        rig.spin()
    for finished in rig.said:
        assert finished.result.wait_s == pytest.approx(6.0)
        assert finished.result.ffn_s == pytest.approx(1.5)  # of the rank that worked longest
        assert finished.result.transfer_s == pytest.approx(4.5)


@pytest.mark.parametrize(("order", "runs"), [("ticket", [1, 2, 0]), ("none", [1, 0, 2])])
def test_a_segment_that_was_ready_first_runs_first_under_ticket(make_rig, order, runs):
    rig = make_rig(order=order)
    for lane in range(3):
        rig.step(lane)
    rig.spin()
    rig.worker.log.clear()
    rig.answer(1, 0)
    rig.answer(2, 0)
    rig.loop.advance()
    rig.answer(0, 0)
    rig.spin()
    assert rig.worker.log == [(lane, 1) for lane in runs]


def test_a_prefill_lane_yields_to_decode_but_does_not_starve(make_rig):
    rig = make_rig(order="priority")
    rig.worker.num_layers = 1000
    rig.worker.cost_s = 0.01
    rig.step(0, priority=1)
    rig.step(1, priority=0)
    rig.spin()
    layers = [0, 0, 0]
    rig.worker.log.clear()
    while rig.clock.now_s < 110.0:
        for lane in (0, 1):
            rig.answer(lane, layers[lane])
        assert rig.loop.advance()
        layers[rig.worker.log[-1][0]] = rig.worker.log[-1][1]
    turns = [lane for lane, _ in rig.worker.log]
    gaps = np.diff([idx for idx, lane in enumerate(turns) if lane == 0])
    assert turns[0] == 1, "decode first"
    assert 4 <= turns.count(0) <= 10, "prefill waits, but for a quarter of the deadline at most"
    assert gaps.max() * 0.01 <= DEADLINE_S / 4 + 0.1


def test_a_wait_past_the_deadline_ends_that_step_and_names_who_is_missing(make_rig):
    rig = make_rig(peers=("w0", "w1", "w2"))
    rig.step(0)
    rig.step(1, step_seq=9)
    rig.spin()
    rig.answer(0, 0, peers=("w1",))
    rig.clock.now_s += DEADLINE_S - 0.1
    rig.answer(1, 0, step_seq=9)
    rig.spin()
    assert rig.said == []
    rig.clock.now_s += 0.2
    rig.spin()
    (ended,) = rig.said
    assert (ended.lane, ended.step_seq, ended.waiting_on, ended.fatal) == (0, 1, ("w0", "w2"), False)
    assert ended.error == "kv0: no answer from w0, w2 within 5 s in step 1 of lane 0 (m)"
    assert rig.worker.closed == [(0, 1)]
    for layer in (1, 2):
        rig.answer(1, layer, step_seq=9)
        rig.spin()
    assert isinstance(rig.said[-1], StepFinished)


def test_each_wait_has_the_whole_deadline(make_rig):
    rig = make_rig()
    rig.step()
    for layer in range(3):
        rig.spin()
        rig.clock.now_s += DEADLINE_S * 0.9
        rig.answer(0, layer)
    rig.spin()
    assert isinstance(rig.said[-1], StepFinished)


def test_an_exception_ends_its_step_with_one_line_and_nothing_else(make_rig):
    rig = make_rig()
    rig.worker.fails_at = (0, 1)
    rig.step(0)
    rig.step(1)
    rig.spin()
    for lane in (0, 1):
        rig.answer(lane, 0)
    rig.spin()
    assert rig.said == [StepEnded(0, 1, error="kv0: RuntimeError: out of luck", fatal=True)]
    assert rig.worker.log[-1] in ((0, 1), (1, 1))
    assert rig.loop.is_busy


def test_a_newer_step_supersedes_a_stale_one_and_late_answers_do_not_count_for_it(make_rig):
    rig = make_rig()
    rig.step(0, step_seq=1)
    rig.spin()
    rig.step(0, step_seq=2)
    assert rig.worker.closed == [(0, 1)]
    rig.spin()
    rig.answer(0, 0, step_seq=1)
    assert not rig.loop.has_work()
    rig.answer(0, 0, step_seq=2)
    assert rig.loop.has_work()


def test_a_step_behind_another_runs_after_it(make_rig):
    rig = make_rig()
    rig.step(0, step_seq=1)
    rig.spin()
    rig.step(0, step_seq=4, behind=1)
    rig.spin()
    assert rig.worker.log == [(0, 0)]
    assert rig.worker.closed == []
    for step_seq in (1, 4):
        for layer in range(3):
            rig.answer(0, layer, step_seq=step_seq)
            rig.spin()
    assert [said.result.sampled for said in rig.said] == [(1,), (4,)]
    rig.step(0, step_seq=5, behind=4)  # the one before it has ended meanwhile
    rig.spin()
    assert rig.loop.is_busy
    assert len(rig.worker.log) == 7


@pytest.mark.parametrize("how", ["raises", "expires", "aborted", "model removed"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_behind_one_that_failed_is_refused_whether_it_came_before_or_after(make_rig, how, is_late):
    rig = make_rig()
    if how == "raises":
        rig.worker.fails_at = (0, 1)
    rig.step(0, step_seq=1)
    rig.spin()
    if not is_late:
        rig.step(0, step_seq=2, behind=1)
    if how == "raises":
        rig.answer(0, 0)
        rig.spin()
    elif how == "expires":
        rig.clock.now_s += DEADLINE_S + 1
        rig.loop.advance()
    elif how == "aborted":
        rig.loop.handle(messages.AbortStep(0, 1))
    else:
        rig.loop.handle(messages.RemoveModel("m"))
    if is_late:
        rig.step(0, step_seq=2, behind=1)
    first, second = [said for said in rig.said if isinstance(said, StepEnded)]
    assert (first.step_seq, second.step_seq) == (1, 2)
    assert second == StepEnded(0, 2, error="kv0: step 1 of lane 0, behind which it came, failed")
    assert not rig.loop.is_busy
    assert len(rig.worker.log) <= 2


def test_a_step_that_waits_behind_another_can_be_aborted_alone(make_rig):
    rig = make_rig()
    rig.step(0, step_seq=1)
    rig.step(0, step_seq=2, behind=1)
    rig.loop.handle(messages.AbortStep(0, 2))
    assert rig.said == [StepEnded(0, 2)]
    for layer in range(3):
        rig.spin()
        rig.answer(0, layer)
    rig.spin()
    assert rig.said[-1].result.step_seq == 1
    assert not rig.loop.is_busy


def test_a_step_that_is_not_newer_is_refused(make_rig):
    rig = make_rig()
    rig.step(0, step_seq=3)
    rig.step(0, step_seq=3)
    (ended,) = rig.said
    assert ended.fatal
    assert ended.error == "kv0: step 3 of lane 0 is not newer than its last step"
    assert rig.worker.closed == []


def test_an_abort_is_answered_if_the_step_still_ran(make_rig):
    rig = make_rig()
    rig.step(0)
    rig.spin()
    rig.loop.handle(messages.AbortStep(0, 2))
    assert rig.said == []
    rig.loop.handle(messages.AbortStep(0, 1))
    assert rig.said == [StepEnded(0, 1)]
    rig.loop.handle(messages.AbortStep(0, 1))
    assert len(rig.said) == 1


def test_a_lane_without_channels_is_named(make_rig):
    rig = make_rig(num_lanes=1)
    rig.step(5)
    (ended,) = rig.said
    assert ended.fatal
    assert ended.error == "kv0: ValueError: lane 5 has no channels for m to w0"
    rig.loop.handle(messages.CloseChannels("w0"))
    rig.step(0)
    assert "no channels" in rig.said[-1].error


def test_channels_made_anew_are_those_of_the_next_step(make_rig):
    rig = make_rig()
    rig.step(0)
    rig.spin()
    rig.open(0, "w0")
    rig.step(0, step_seq=2)
    rig.spin()
    assert rig.into[0, "w0"].arrived(epoch(2, 0))


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


def test_a_weights_rank_waits_longer_than_a_kv_rank_and_stays_silent_at_the_end(tmp_path):
    clock, said = Clock(), []
    around = RankSurroundings(
        emit=said.append,
        ring=lambda peer: lambda: None,
        wake=lambda: None,
        clock=clock,
        order=ORDER_POLICIES["ticket"],
        step_deadline_s=DEADLINE_S,
        start=start_now,
    )
    loop = RankLoop("w0", RankWorker(ffn_worker=FakeFFNWorker("w0")), around)
    model = FakeModel(num_layers=1)
    loop.handle(messages.AddModel(model.placement("m", tmp_path / "m", ("w0",)), 1))
    loop.advance()
    region = ArrayRegion(link_bytes(CAPACITY))
    loop.handle(messages.OpenChannels(0, "kv0", CAPACITY, region))
    outlet = ChannelOutlet(a2f_part(region.map(), CAPACITY), CAPACITY, lambda: None)
    said.clear()
    for step_seq in (1, 2):
        header = StepHeader(lane=0, model="m", step_seq=step_seq, phase="decode", num_tokens=1)
        loop.handle(messages.Step(header))
        loop.advance()
        if step_seq == 1:
            outlet.put(0, epoch(1, 0), np.ones((1, 8), np.float32))
            while loop.advance():
                pass
            assert said == []
    clock.now_s += DEADLINE_S * 1.5
    loop.advance()
    assert said == []
    clock.now_s += DEADLINE_S
    loop.advance()
    (ended,) = said
    assert ended.waiting_on == ("kv0",)


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


class ScriptedShare:
    """The share of a rank that has no part in any step: what it remembers of one it takes in when that begins."""

    def __init__(self):
        self.begun = []

    def run_share(self, step, links):
        self.begun.append(step.header.step_seq)
        return (wait for wait in ())


@pytest.fixture
def share_rig(make_rig):
    rig = make_rig(peers=("kv1",))
    rig.share = ScriptedShare()
    rig.loop._worker = RankWorker(attention_worker=rig.worker, share_worker=rig.share)

    def step(step_seq, behind=0):
        header = StepHeader(lane=0, model="m", step_seq=step_seq, phase="decode", num_tokens=1, kv_rank="kv1")
        rig.loop.handle(messages.Step(StepDescriptor(header=header, rows=()), behind))

    rig.step = step
    return rig


@pytest.mark.parametrize("behind", [2, 0])
def test_a_share_that_is_late_begins_every_step_in_turn(share_rig, behind):
    """The home waits for no share without a part in a step: two more may come before this rank has looked at one."""
    share_rig.step(1)
    share_rig.step(2, behind=1)
    share_rig.step(3, behind=behind)
    share_rig.spin()
    assert share_rig.share.begun == [1, 2, 3]
    share_rig.step(4)
    share_rig.spin()
    assert share_rig.share.begun == [1, 2, 3, 4]
    assert not share_rig.said


def test_a_step_behind_one_that_is_aborted_is_forgotten_on_a_share(share_rig):
    share_rig.step(1)
    share_rig.step(2, behind=1)
    share_rig.loop.handle(messages.AbortStep(0, 1))
    share_rig.spin()
    assert share_rig.share.begun == [1]
    assert not share_rig.loop.is_busy
    assert not share_rig.said
