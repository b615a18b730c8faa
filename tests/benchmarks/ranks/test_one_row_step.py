"""Steps of one sequence alone: prompts, decode of a token that is known, and of one that the device drew."""

from __future__ import annotations

from benchmarks.ranks.one_row_step import one_row_step
from crosspool.core import SamplingParams


def test_a_prompt_brings_its_sequence_and_its_pages() -> None:
    sampling = SamplingParams(max_tokens=4)
    step = one_row_step("m", "kv0", 3, 9, [5, 6, 7], 0, new_pages=[(1, 2)], joining=sampling)
    (row,), (new,) = step.rows, step.joining
    assert (step.header.phase, step.header.num_tokens, step.header.step_seq) == ("prefill", 3, 3)
    assert (row.token_ids, row.num_new_tokens, row.new_pages) == ((5, 6, 7), 3, ((1, 2),))
    assert (new.sequence_id, new.prompt_token_ids, new.sampling) == (9, (5, 6, 7), sampling)


def test_no_token_means_the_one_that_was_drawn() -> None:
    known, drawn = one_row_step("m", "kv0", 4, 9, [8], 3), one_row_step("m", "kv0", 4, 9, None, 3)
    assert known.header == drawn.header
    assert (known.header.phase, known.header.num_tokens, known.joining) == ("decode", 1, ())
    assert (known.rows[0].token_ids, drawn.rows[0].token_ids) == ((8,), None)
    assert known.rows[0].num_cached_tokens == drawn.rows[0].num_cached_tokens == 3
