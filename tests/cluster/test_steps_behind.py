"""The step behind a lane's running one, in a rank's loop: it runs after that, or not at all, and may begin ahead."""

from functools import partial

import pytest

from crosspool.cluster import messages
from crosspool.cluster.messages import StepEnded, StepFinished
from crosspool.scheduler.step import StepDescriptor, StepHeader
from tests.support.rank_rig import DEADLINE_S, KVRig


@pytest.fixture
def make_rig(tmp_path):
    return partial(KVRig, tmp_path / "m")


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


class ScriptedShare:
    """The share of a rank that has no part in any step: what it remembers of one it takes in when that begins."""

    def __init__(self):
        self.begun = []

    def run_share(self, step, links):
        self.begun.append(step.header.step_seq)
        return (wait for wait in ())


@pytest.fixture
def share_rig(make_rig):
    share = ScriptedShare()
    rig = make_rig(peers=("kv1",), share=share)
    rig.share = share

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


def test_a_step_behind_begins_ahead_and_goes_on_once_the_one_before_has_ended(make_rig):
    rig = make_rig(goes_ahead=True)
    rig.step()
    rig.spin()
    rig.step(step_seq=2, behind=1)
    assert rig.worker.log == [(0, 0), (0, 0)], "its first segment has run"
    for layer in range(3):
        rig.clock.now_s += 1.0
        rig.answer(0, layer)
        rig.spin()
    assert [type(said) for said in rig.said] == [StepFinished]
    rig.clock.now_s += 1.0
    for layer in range(3):
        rig.answer(0, layer, step_seq=2)
        rig.spin()
    (result,) = [said.result for said in rig.said[1:]]
    assert result.step_seq == 2
    assert result.wait_s == 1.0, "what it waited for the step before is not its own"
    assert rig.worker.log == [(0, 0), (0, 0), (0, 1), (0, 2), (0, 1), (0, 2)]


def test_a_step_begins_ahead_as_soon_as_it_may(make_rig):
    rig = make_rig(goes_ahead=True)
    rig.worker.may_begin_ahead = lambda work: (0, 1) in rig.worker.log
    rig.step()
    rig.spin()
    rig.step(step_seq=2, behind=1)
    assert rig.worker.log == [(0, 0)]
    rig.answer(0, 0)
    rig.spin()
    assert rig.worker.log == [(0, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize("how", ["raises", "expires", "aborted", "model removed", "closed"])
def test_a_step_that_began_ahead_is_given_up_with_the_one_before(make_rig, how):
    rig = make_rig(goes_ahead=True)
    rig.step()
    rig.spin()
    rig.step(step_seq=2, behind=1)
    if how == "raises":
        rig.worker.fails_at = (0, 1)
        rig.answer(0, 0)
        rig.spin()
    elif how == "expires":
        rig.clock.now_s += DEADLINE_S + 1
        rig.spin()
    elif how == "aborted":
        rig.loop.handle(messages.AbortStep(0, 1))
    elif how == "closed":
        rig.loop.close()
    else:
        rig.loop.handle(messages.RemoveModel("m"))
    assert (0, 2) in rig.worker.closed
    assert not rig.loop.is_busy
    if how != "closed":
        assert [said.step_seq for said in rig.said if isinstance(said, StepEnded)] == [1, 2]


def test_a_step_that_began_ahead_can_be_aborted_alone(make_rig):
    rig = make_rig(goes_ahead=True)
    rig.step()
    rig.spin()
    rig.step(step_seq=2, behind=1)
    rig.loop.handle(messages.AbortStep(0, 2))
    assert rig.worker.closed == [(0, 2)]
    for layer in range(3):
        rig.answer(0, layer)
        rig.spin()
    assert [type(said) for said in rig.said] == [StepEnded, StepFinished]


def test_a_step_that_fails_as_it_begins_ahead_ends_alone(make_rig):
    rig = make_rig(goes_ahead=True)
    rig.step()
    rig.spin()
    rig.worker.fails_at = (0, 0)
    rig.step(step_seq=2, behind=1)
    (ended,) = rig.said
    assert (ended.step_seq, ended.fatal) == (2, True)
    rig.worker.fails_at = None
    for layer in range(3):
        rig.answer(0, layer)
        rig.spin()
    assert isinstance(rig.said[-1], StepFinished)
