"""Messages survive the way through bytes, every field of them."""

import dataclasses

import pytest

from crosspool.cluster import wire
from crosspool.cluster.messages import Forget, Step, StepEnded, StepFinished, StepTold
from crosspool.core import SampledToken, SamplingParams, TokenLogprob
from crosspool.scheduler.step import NewSequence, StepDescriptor, StepHeader, StepResult, StepRow

HEADER = StepHeader(
    lane=3,
    model="m",
    step_seq=9,
    phase="prefill",
    num_tokens=4,
    priority=1,
    kv_rank="kv1",
    num_steps=2,
    prefill_rank="p1",
    next_model="n",
)
ROW = StepRow(
    sequence_id=5,
    token_ids=(1, 2, 3),
    num_cached_tokens=7,
    num_new_tokens=3,
    first_new_page=2,
    new_pages=((4, 5), (6, 7)),
    sample=False,
    allowed=b"\x05\x80",
)
SAMPLING = SamplingParams(max_tokens=4, min_tokens=2, logit_bias=((3, 1.5),), stop_token_ids=(8,), num_logprobs=2)
NEW = NewSequence(sequence_id=5, prompt_token_ids=(1, 2), output_token_ids=(3,), sampling=SAMPLING)
TOKEN = SampledToken(5, 77, -0.5, (TokenLogprob(77, -0.5), TokenLogprob(1, -9999.0)))


@pytest.mark.parametrize(
    "message",
    [
        Step(HEADER, 8),
        Step(StepDescriptor(header=HEADER, rows=(ROW, ROW._replace(allowed=None))), 8),
        StepFinished(
            StepResult(lane=3, step_seq=9, sampled=(SampledToken(6, 1),), attention_s=0.5, wait_s=0.1, ffn_s=0.05)
        ),
        Step(StepDescriptor(header=HEADER, rows=(ROW, ROW._replace(token_ids=None)), joining=(NEW,))),
        StepFinished(StepResult(lane=3, step_seq=9, sampled=(TOKEN, SampledToken(6, 1)), attention_s=0.5, wait_s=0.1)),
        StepFinished(
            StepResult(lane=3, step_seq=9, sampled=(SampledToken(6, 1),), attention_s=0.5),
            told=((SampledToken(6, 2),), (SampledToken(6, 3),)),
        ),
        StepTold(1, 2, ((SampledToken(6, 1), SampledToken(5, 3)), (SampledToken(6, 4), SampledToken(5, 2)))),
        StepTold(1, 2, ((TOKEN,),)),
        StepEnded(1, 2, ("w0",), "w0: late", fatal=True),
        Forget((1, 2)),
    ],
)
def test_a_message_is_the_same_on_the_other_side(message):
    there = wire.loads(wire.dumps(("kv0", message)))
    assert there == ("kv0", message)
    assert repr(there) == repr(("kv0", message))


def test_no_field_of_a_message_is_at_its_default_in_this_test():
    for value in (HEADER, ROW, TOKEN):
        for name, default in value._field_defaults.items():
            assert getattr(value, name) != default, f"{type(value).__name__}.{name}"


def test_decode_steps_and_their_results_are_not_pickled():
    step = StepDescriptor(header=HEADER, rows=(ROW,))
    for message in (Step(HEADER), Step(step, 8), StepFinished(StepResult(lane=3, step_seq=9, sampled=()))):
        assert wire.dumps(("kv0", message))[0] != wire.dumps(("kv0", Forget((1,))))[0]


def test_a_flat_step_leaves_out_no_field_of_its_descriptor():
    assert [field.name for field in dataclasses.fields(StepDescriptor)] == ["header", "rows", "joining"]
