"""A run gives what its steps give one by one: any prefix of a schedule leaves the same tokens and the same memory."""

from dataclasses import replace

import numpy as np
import pytest

from crosspool.core import SamplingParams
from crosspool.kv_pool.geometry import page_geometry
from crosspool.scheduler.step import run_over
from tests.support.run_schedules import one_by_one, prefill, runs
from tests.support.split_and_whole import FRAME_BYTES, PAGE_TOKENS, model_dir, split

GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
SEEDED = SamplingParams(max_tokens=50, temperature=1.2, seed=5, top_p=0.95, presence_penalty=0.5, num_logprobs=3)
SEEDED_TOO = replace(SEEDED, seed=6)
LENGTHS = (5, 1, 3, 4)


def schedule(family, sampling=(GREEDY, SEEDED), num_prompt_tokens=(5, 11)):
    spec = model_dir(family).spec
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, spec.vocab_size, length).tolist() for length in num_prompt_tokens]
    geometry = page_geometry(spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype="float32")
    return prefill(family, geometry, prompts, sampling, pages=4), runs(family, prompts, LENGTHS)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("prefix", range(len(LENGTHS) + 1))
def test_any_prefix_of_a_schedule_leaves_the_same_in_runs_and_in_steps(family, prefix):
    begin, decode = schedule(family)
    by_runs, by_steps = split(family, 2), split(family, 2)
    found, expected = [], []
    for step in (*begin, *decode[:prefix]):
        last = by_runs.run(step, np.random.default_rng(prefix))
        found += [*by_runs.told, last]
        expected += [by_steps.run(part) for part in one_by_one(step)]
    assert found == expected
    assert len(found) == len(begin) + sum(LENGTHS[:prefix])
    assert (by_runs.attention._arena == by_steps.attention._arena).all()
    for rank in by_runs.ffn:  # what crossed last, in both directions and in both slots
        for mine, other in zip((by_runs.a2f, by_runs.f2a), (by_steps.a2f, by_steps.f2a), strict=True):
            for slot in range(2):
                assert np.array_equal(mine[rank]._slots[slot], other[rank]._slots[slot])


def test_a_run_given_up_anywhere_goes_on_behind_what_it_told():
    begin, decode = schedule("qwen3_moe")
    undisturbed = split("qwen3_moe", 2)
    for step in begin:
        undisturbed.run(step)
    expected = [undisturbed.run(part) for part in one_by_one(decode[0])]
    for max_segments in range(0, 60, 7):
        pools = split("qwen3_moe", 2)
        for step in begin:
            pools.run(step)
        last = pools.run(decode[0], np.random.default_rng(max_segments), max_segments=max_segments)
        found = [*pools.told] + ([last] if last is not None else [])
        if last is None:
            rest = decode[0].advanced(len(found)).replayed(decode[0].header.step_seq + 1)
            last = pools.run(rest)
            found += [*pools.told, last]
        assert found == expected, f"given up after {max_segments} segments"


def test_a_run_ends_once_every_sequence_has_drawn_a_stop_token():
    """Each row's stop token comes in a step of its own; what a row that has ended draws later plays no part."""
    begin, decode = schedule("qwen3_moe", (SEEDED, SEEDED_TOO))
    pools = split("qwen3_moe", 2)
    for step in begin:
        pools.run(step)
    tokens = [tuple(token.token_id for token in pools.run(part)) for part in one_by_one(decode[0])]
    first = [next(i for i in range(5) if column.index(column[i]) == i and i >= least) for column, least in ends(tokens)]
    stops = [
        replace(params, stop_token_ids=(tokens[at][row],))
        for row, (params, at) in enumerate(zip((SEEDED, SEEDED_TOO), first, strict=True))
    ]
    pools = split("qwen3_moe", 2)
    begin, decode = schedule("qwen3_moe", stops)
    for step in begin:
        pools.run(step)
    last = pools.run(decode[0])
    found = [tuple(token.token_id for token in step) for step in (*pools.told, last)]
    assert found == tokens[: max(first) + 1]
    assert 0 < max(first) < 4
    pools.run(decode[1])  # handed out behind it: rows of sequences that have ended, which find a token all the same
    over = run_over(decode[0].header.step_seq, 5, model_dir("qwen3_moe").spec.num_layers)
    assert over < decode[0].header.step_seq * 1024 + 1025, "below the next step's first epoch"


def ends(tokens):
    """Each row's tokens, and the first step in which it may end: the second row's comes after the first's."""
    return [([step[0] for step in tokens], 0), ([step[1] for step in tokens], 2)]
