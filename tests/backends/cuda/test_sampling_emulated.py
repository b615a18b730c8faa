"""The device sampler on the CPU against the NumPy sampler: the same random numbers give the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.kernels.sampling import Sampler, fill_sampling, sampling_records  # noqa: E402
from crosspool.backends.sequences.philox import UniformStream  # noqa: E402
from crosspool.backends.sequences.sampler import SamplingRow, sample  # noqa: E402
from crosspool.core import SamplingParams  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")


def row(position=3, seed=0, **options):
    params = SamplingParams(max_tokens=8, seed=seed, **options)
    return SamplingRow(1, params, [1, 2, 3], 2, position, UniformStream(seed))


def both(logits, rows):
    """Tokens of the device sampler and of the NumPy one."""
    sampler = Sampler(EmulatedKernels(), len(rows), logits.shape[1], CPU)
    records = sampling_records(len(rows))
    for idx, own in enumerate(rows):
        if not own.params.is_greedy:
            fill_sampling(records, idx, own)
    sampler.rows.copy_(torch.from_numpy(records.view(np.int32).reshape(len(rows), -1).copy()))
    expected = [token.token_id for token in sample(logits.numpy().copy(), rows)]
    return sampler(logits.clone()).tolist(), expected


OPTIONS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.2},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "top_k": {"temperature": 1.5, "top_k": 7},
    "top_1": {"temperature": 1.5, "top_k": 1},
    "top_p": {"temperature": 1.2, "top_p": 0.7},
    "tiny_top_p": {"temperature": 1.2, "top_p": 0.01},
    "all": {"temperature": 1.1, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("vocab", [50, 3000])
def test_the_device_draws_the_hosts_tokens(name, vocab):
    logits = 2.0 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    rows = [row(position=3 + idx, seed=idx, **OPTIONS[name]) for idx in range(6)]
    drawn, expected = both(logits, rows)
    assert drawn == expected


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.6}, {"min_p": 1.0}])
def test_equal_weights_are_kept_by_id(options):
    logits = torch.zeros(8, 200)
    logits[:, 100:] = 1.0  # the best hundred are equal
    rows = [row(position=3 + idx, seed=idx, temperature=1.0, **options) for idx in range(8)]
    drawn, expected = both(logits, rows)
    assert drawn == expected


def test_rows_of_one_pass_are_drawn_each_in_its_own_way():
    logits = torch.randn(len(OPTIONS), 500, generator=torch.Generator().manual_seed(9))
    drawn, expected = both(logits, [row(seed=idx, **options) for idx, options in enumerate(OPTIONS.values())])
    assert drawn == expected


def test_logits_that_are_no_distribution_give_the_best_token():
    logits = torch.zeros(2, 64)
    logits[0, 5] = float("inf")
    logits[1, 9] = float("nan")
    drawn, _ = both(logits, [row(temperature=1.0), row(temperature=1.0)])
    assert drawn[0] == 5
    assert 0 <= drawn[1] < 64


@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (3, 5000), (2, 4096)])
def test_greedy_is_the_first_of_the_largest(rows, vocab):
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    drawn = Sampler(EmulatedKernels(), rows, vocab, CPU)(logits).tolist()
    assert drawn == logits.numpy().argmax(-1).tolist()
