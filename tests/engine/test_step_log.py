"""The log of ended steps, and since when a model has waited for one."""

from crosspool.engine.stats import StepTotals
from crosspool.engine.step_log import STEPS_KEPT, StepLog
from crosspool.scheduler.step import StepHeader, StepResult
from tests.support.core_drive import Drive, a_config, a_model


def test_steps_since_a_moment_come_oldest_first_and_old_ones_are_forgotten():
    log = StepLog()
    for number in range(STEPS_KEPT + 5):
        header = StepHeader(lane=number % 2, model="p", step_seq=number, phase="decode", num_tokens=3)
        log.add(header, number, number + 1, a_result())
    assert [span.started_s for span in log.since(STEPS_KEPT + 2)] == [STEPS_KEPT + 2, STEPS_KEPT + 3, STEPS_KEPT + 4]
    assert log.since(STEPS_KEPT + 5) == []
    assert len(log.since(-1.0)) == STEPS_KEPT
    assert log.last_end_s("p") == STEPS_KEPT + 5
    log.forget("p")
    assert log.last_end_s("p") is None


def test_totals_add_up_by_model_and_phase_and_leave_with_the_model():
    log = StepLog()
    for phase, model, count in (("prefill", "p", 1), ("decode", "p", 1), ("decode", "p", 5), ("decode", "q", 1)):
        log.add(StepHeader(lane=0, model=model, step_seq=1, phase=phase, num_tokens=3), 0.0, 1.0, a_result(), count)
    header = StepHeader(lane=0, model="p", step_seq=2, phase="decode", num_tokens=2)
    log.add(header, 1.0, 2.0, StepResult(lane=0, step_seq=2, sampled=(), attention_s=0.5, wait_s=0.5))  # not told apart
    found = log.totals("p")
    assert found["prefill"] == StepTotals(
        num_steps=1, num_tokens=3, num_told=1, attention_s=0.25, ffn_s=0.125, transfer_s=0.375
    )
    decode = found["decode"]
    assert (decode.num_steps, decode.num_tokens, decode.num_told) == (7, 20, 6)
    assert (decode.attention_s, decode.ffn_s, decode.transfer_s) == (1.0, 0.25, 0.75)
    last = log.since(-1.0)[-1]
    assert (last.attention_s, last.ffn_s, last.transfer_s) == (0.5, None, None)
    log.forget("p")
    assert log.totals("p") == {}
    assert log.totals("q")["decode"].num_steps == 1


def a_result():
    return StepResult(lane=0, step_seq=1, sampled=(), attention_s=0.25, wait_s=0.5, ffn_s=0.125)


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
