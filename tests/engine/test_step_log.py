"""The log of ended steps, and since when a model has waited for one."""

from crosspool.engine.step_log import STEPS_KEPT, StepLog
from crosspool.scheduler.step import StepHeader
from tests.support.core_drive import Drive, a_config, a_model


def test_steps_since_a_moment_come_oldest_first_and_old_ones_are_forgotten():
    log = StepLog()
    for number in range(STEPS_KEPT + 5):
        header = StepHeader(lane=number % 2, model="p", step_seq=number, phase="decode", num_tokens=3)
        log.add(header, number, number + 1, 0.25)
    assert [span.started_s for span in log.since(STEPS_KEPT + 2)] == [STEPS_KEPT + 2, STEPS_KEPT + 3, STEPS_KEPT + 4]
    assert log.since(STEPS_KEPT + 5) == []
    assert len(log.since(-1.0)) == STEPS_KEPT
    assert log.last_end_s("p") == STEPS_KEPT + 5
    log.forget("p")
    assert log.last_end_s("p") is None


def test_the_core_logs_each_step_and_tells_since_when_a_model_waits():
    drive = Drive(a_config(20), [a_model("p"), a_model("q")])
    drive.cluster.durations = {"p": 0.5}
    drive.add("p", 4, 3)
    drive.turn()
    p, q = drive.core.stats(drive.now + 0.25).models
    assert (p.busy_since_s, q.busy_since_s) == (drive.now, None)
    drive.run()
    spans = drive.core.log.since(-1.0)
    assert [(span.model, span.phase, span.num_tokens) for span in spans] == [
        ("p", "prefill", 4),
        ("p", "decode", 1),
        ("p", "decode", 1),
    ]
    assert all(span.ended_s - span.started_s == 0.5 for span in spans)
    assert drive.core.stats(drive.now).models[0].busy_since_s is None
