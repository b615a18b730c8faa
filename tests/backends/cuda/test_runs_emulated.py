"""Runs on the CUDA workers' kernels: a prefix of a schedule leaves the same in runs and in steps, and for NumPy."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.core import SamplingParams  # noqa: E402
from crosspool.kv_pool.geometry import page_geometry  # noqa: E402
from tests.backends.cuda.decoding import FRAME_BYTES  # noqa: E402
from tests.backends.cuda.worker_pair import PAGE_TOKENS, Pair  # noqa: E402
from tests.support.direct_lanes import SplitModel  # noqa: E402
from tests.support.run_schedules import one_by_one, prefill, runs  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]

LENGTHS = (3, 1, 2)
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
DRAWN = SamplingParams(max_tokens=50, temperature=1.0, seed=5, top_p=0.95)
HOSTED = SamplingParams(max_tokens=50, temperature=1.0, seed=5, presence_penalty=0.5)


def schedule(directory, sampling, model="tiny", dtype="bfloat16"):
    rng = np.random.default_rng(7)
    prompts = [rng.integers(1, directory.spec.vocab_size, length).tolist() for length in (5, 9)]
    geometry = page_geometry(directory.spec, page_tokens=PAGE_TOKENS, frame_bytes=FRAME_BYTES, kv_dtype=dtype)
    return prefill(model, geometry, prompts, sampling, pages=3), runs(model, prompts, LENGTHS)


def play(pair, steps, *, in_runs: bool):
    """Tokens of every step, one by one."""
    found = []
    for step in steps:
        if in_runs:
            last = pair.run(step)
            found += [*pair.told, last]
        else:
            found += [pair.run(part) for part in one_by_one(step)]
    return [[token.token_id for token in step] for step in found]


@pytest.mark.parametrize("sampling", [(GREEDY, DRAWN), (GREEDY, HOSTED)])
@pytest.mark.parametrize("prefix", [0, 2, 3])
def test_any_prefix_of_a_schedule_leaves_the_same_in_runs_and_in_steps(directory, prefix, sampling):
    begin, decode = schedule(directory, sampling)
    steps = (*begin, *decode[:prefix])
    by_runs, by_steps = Pair(directory, 2), Pair(directory, 2)
    assert play(by_runs, steps, in_runs=True) == play(by_steps, steps, in_runs=False)
    arenas = [pair.kv._models.led("tiny").frames for pair in (by_runs, by_steps)]
    assert torch.equal(*arenas)
    assert arenas[0].any()


def test_a_run_gives_the_tokens_of_the_numpy_workers(directory):
    begin, decode = schedule(directory, (GREEDY, GREEDY))
    found = play(Pair(directory), (*begin, *decode), in_runs=True)
    family = directory.spec.family
    model = SplitModel(directory, page_tokens=PAGE_TOKENS, num_frames=64, frame_bytes=FRAME_BYTES)
    begin, decode = schedule(directory, (GREEDY, GREEDY), model=family, dtype="float32")
    expected = []
    for step in (*begin, *decode):
        last = model.run(step)
        expected += [[token.token_id for token in each] for each in (*model.told, last)]
    same = sum(mine == theirs for mine, theirs in zip(found, expected, strict=True))
    assert same >= len(expected) - 1, "bfloat16 may choose another of two tokens that are as likely"


def test_a_run_ends_early_for_every_rank(directory):
    begin, decode = schedule(directory, (GREEDY, GREEDY))
    first = play(Pair(directory), (*begin, decode[0]), in_runs=False)[2:]
    stops = [SamplingParams(max_tokens=50, temperature=0.0, stop_token_ids=(first[1][row],)) for row in range(2)]
    pair = Pair(directory, 2)
    begin, decode = schedule(directory, stops)
    found = play(pair, (*begin, decode[0]), in_runs=True)[2:]
    last = next(idx for idx in range(3) if all(any(first[i][r] == first[1][r] for i in range(idx + 1)) for r in (0, 1)))
    assert found == first[: last + 1]
    assert last < 2
    play(pair, decode[1:], in_runs=True)  # rows of sequences that have ended find a token to run
