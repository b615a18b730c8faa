"""One rank's loop by itself: order, deadlines, stale steps, exceptions."""

from functools import partial

import numpy as np
import pytest

from crosspool.cluster import messages
from crosspool.cluster.channel import ChannelOutlet, WorkClock, a2f_part, f2a_part, link_bytes
from crosspool.cluster.lane_run import TELL_EVERY_S
from crosspool.cluster.messages import StepEnded, StepFinished
from crosspool.cluster.rank_loop import RankLoop
from crosspool.cluster.region import ArrayRegion
from crosspool.cluster.worker import RankWorker
from crosspool.core import SampledToken
from crosspool.scheduler.order import ORDER_POLICIES
from crosspool.scheduler.step import StepHeader, epoch
from tests.support.fake_backend import FakeFFNWorker, FakeModel
from tests.support.lone_rank import alone
from tests.support.rank_rig import CAPACITY, DEADLINE_S, Clock, KVRig


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
    rig.worker.told = {1: (first,), 2: (second,), 3: (third,), 5: (last,)}
    rig.step()
    for layer in range(6):
        rig.spin()
        assert rig.said == ([] if layer < 3 else [messages.StepTold(0, 1, (first, second, third))])
        rig.answer(0, layer)
        rig.clock.now_s += TELL_EVERY_S / 3
    rig.spin()
    (finished,) = rig.said[1:]
    assert finished.told == (last,)


def test_steps_that_were_read_together_are_told_at_once(make_rig):
    rig = make_rig()
    first, second = [(SampledToken(7, token),) for token in range(2)]
    rig.worker.told = {1: (first, second)}
    rig.step()
    rig.spin()
    rig.answer(0, 0)
    rig.spin()
    assert rig.said == [messages.StepTold(0, 1, (first, second))]


def test_a_rank_may_nap_only_while_all_its_steps_wait_for_devices(make_rig):
    rig = make_rig()
    assert rig.loop.nap_s() > 1.0, "without steps it asks for nothing"
    until_s = rig.clock.now_s + 0.25
    rig.worker.rest = lambda now_s: max(until_s - now_s, 5e-4)
    rig.step(0)
    assert rig.loop.nap_s() == 0.0, "its first segment is ready"
    rig.spin()
    assert rig.loop.nap_s() == 0.25, "it will hardly have come before"
    rig.clock.now_s += 0.5
    assert rig.loop.nap_s() == 5e-4
    rig.worker.rest = None
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


def test_a_wait_for_the_ranks_own_device_says_so_when_it_is_late(make_rig):
    class Copies:
        def arrived(self, epoch):
            return False

    rig = make_rig()
    rig.worker.inlets_of = lambda layer, inlets: (Copies(),)
    rig.step(0)
    rig.spin()
    rig.clock.now_s += DEADLINE_S + 0.1
    rig.spin()
    (ended,) = rig.said
    assert (ended.waiting_on, ended.error) == (
        (),
        "kv0: no answer from its own device within 5 s in step 1 of lane 0 (m)",
    )


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


def test_an_older_step_that_its_device_has_ended_ends_as_ever_when_a_newer_one_comes(make_rig):
    """Nobody had looked for that yet; a step that the newer one comes behind then runs at once."""
    rig = make_rig(goes_ahead=True)
    rig.worker.num_layers = 1
    rig.worker.rest = lambda now_s: 1.0
    rig.step(0, step_seq=1)
    rig.loop.advance()
    rig.step(0, step_seq=2, behind=1)
    rig.answer(0, 0, step_seq=1)
    rig.step(0, step_seq=3, behind=2)
    assert rig.worker.closed == []
    assert [said.result.step_seq for said in rig.said] == [1]
    rig.answer(0, 0, step_seq=2)
    rig.answer(0, 0, step_seq=3)
    rig.spin()
    assert [said.result.step_seq for said in rig.said] == [1, 2, 3]


def test_a_rank_rests_while_its_only_lane_waits_for_a_device_that_goes_on(make_rig):
    rig = make_rig()
    assert not rig.loop.rests
    rig.step(0)
    rig.loop.advance()
    assert not rig.loop.rests, "its wait is for a peer, who rings"
    rig.worker.rest = lambda now_s: 1.0
    rig.answer(0, 0)
    rig.loop.advance()
    assert rig.loop.rests
    rig.step(1)
    assert not rig.loop.rests, "there is another lane to begin"


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


def test_a_weights_rank_waits_longer_than_a_kv_rank_and_stays_silent_at_the_end(tmp_path):
    clock, said = Clock(), []
    around = alone(said.append, clock=clock, order=ORDER_POLICIES["ticket"], step_deadline_s=DEADLINE_S)
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


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_lone_lane_that_waits_for_nobody_goes_on_in_the_same_turn(make_rig, num_lanes):
    rig = make_rig()
    rig.worker.inlets_of = lambda layer, inlets: () if layer == 0 else inlets
    for lane in range(num_lanes):
        rig.step(lane)
    assert rig.loop.advance()
    assert rig.worker.log == ([(0, 0), (0, 1)] if num_lanes == 1 else [(0, 0)])
