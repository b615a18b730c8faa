"""What a rank remembers of a sequence, as far as no test of the workers shows it."""

import pytest

from crosspool.backends.sequences.sequence import Sequence
from crosspool.core import SamplingParams
from crosspool.scheduler.step import NewSequence, StepRow


def row(num_output=1, allowed=None):
    """The row of a sequence with three prompt tokens whose token comes behind `num_output` others."""
    return StepRow(sequence_id=1, token_ids=None, num_cached_tokens=2 + num_output, num_new_tokens=1, allowed=allowed)


def sequence(**options):
    sampling = SamplingParams(max_tokens=8, **options)
    return Sequence(
        NewSequence(sequence_id=1, prompt_token_ids=(1, 2, 3), output_token_ids=(), sampling=sampling), "m", 1, 9
    )


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.5, "top_k": 4, "min_p": 0.1}]
)
def test_a_token_that_logits_alone_decide_is_plain(options):
    assert sequence(**options).is_plain(row())


@pytest.mark.parametrize(
    "options",
    [
        {"num_logprobs": 0},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((3, 1.0),)},
    ],
)
def test_penalties_bias_and_log_probabilities_ask_for_more_than_logits(options):
    assert not sequence(temperature=0.0, **options).is_plain(row())


def test_end_tokens_are_masked_until_enough_tokens_are_there():
    few = sequence(min_tokens=4)
    assert [few.is_plain(row(num_output)) for num_output in range(6)] == [False] * 4 + [True] * 2


def test_a_grammar_masks_tokens():
    assert not sequence().is_plain(row(allowed=b"\x01"))
