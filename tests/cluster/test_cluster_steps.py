"""What the cluster makes of what ranks say about steps. Ranks are the test."""

import pytest

from crosspool.cluster.base import StepDone, StepFailed, StepTokens
from crosspool.cluster.cluster_steps import ClusterSteps
from crosspool.cluster.messages import AbortStep, Step, StepEnded, StepFinished
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepHeader, StepResult
from tests.support.fake_backend import FakeModel

RANKS = ("kv0", "w0", "w1")
TOKENS = (SampledToken(7, 1),)


class Rig:
    def __init__(self, directory):
        self.sent, self.told = [], []
        self.steps = ClusterSteps(lambda rank, message: self.sent.append((rank, message)), self.told.append)
        self.placement = FakeModel().placement("m", directory, ("w0", "w1"))

    def begin(self, step_seq):
        header = StepHeader(lane=0, model="m", step_seq=step_seq, phase="decode", num_tokens=1)
        self.steps.begin(StepDescriptor(header=header, rows=()), self.placement, RANKS)
        return header


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path / "m")
    made.begin(1)
    return made


def test_the_leading_rank_gets_the_descriptor_last_and_a_second_step_comes_behind(rig):
    assert [rank for rank, _ in rig.sent] == ["w1", "w0", "kv0"]
    assert [type(message.work) for _, message in rig.sent] == [StepHeader, StepHeader, StepDescriptor]
    rig.sent.clear()
    header = rig.begin(2)
    assert rig.sent[0] == ("w1", Step(header, 1))


def test_tokens_of_a_run_come_before_its_result_and_only_from_who_leads_it(rig):
    finished = StepFinished(StepResult(lane=0, step_seq=1, sampled=TOKENS), told=(TOKENS, TOKENS))
    rig.steps.told("w0", 0, 1, (TOKENS,))
    assert not rig.told
    rig.steps.finished("kv0", finished)
    assert [type(event) for event in rig.told] == [StepTokens, StepTokens, StepDone]
    assert not rig.steps
    rig.steps.finished("kv0", finished)
    assert len(rig.told) == 3, "a step ends once"


def test_a_step_that_a_weights_rank_failed_waits_for_its_leading_rank(rig):
    assert rig.steps.ended("w0", StepEnded(0, 1, error="w0: no", fatal=True)) == ()
    assert not rig.told
    assert ("kv0", AbortStep(0, 1)) in rig.sent
    rig.steps.ended("kv0", StepEnded(0, 1))
    assert rig.told == [StepFailed(lane=0, step_seq=1, waiting_on=(), error="w0: no", fatal=True)]


def test_a_leading_rank_that_waited_in_vain_names_whom(rig):
    rig.sent.clear()
    assert rig.steps.ended("kv0", StepEnded(0, 1, ("w1",), "kv0: late")) == ("w1",)
    assert [rank for rank, _ in rig.sent] == ["w0", "w1"]
    assert [event.error for event in rig.told] == ["kv0: late"]


@pytest.mark.parametrize(("lost", "is_told"), [("kv0", True), ("w1", False)])
def test_steps_of_a_lost_rank_fail_at_once_only_where_it_led_them(rig, lost, is_told):
    rig.steps.lose(lost, f"{lost} is lost")
    assert [event.waiting_on for event in rig.told] == ([("kv0",)] if is_told else [])
    assert rig.steps.is_on("w0") is not is_told
