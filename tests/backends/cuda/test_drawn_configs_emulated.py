"""Any config that a family can have, on the emulated kernels: tokens are as probable as the NumPy backend says.

FAMILY_DRAWS (20) of each that GPUs take; FAMILY_SEED (0) is the first.
"""

from __future__ import annotations

import os
from itertools import count, islice

import numpy as np
import pytest

from crosspool.backends.cuda.kernels.limits import check_shapes
from crosspool.backends.numpy import router
from crosspool.core import SampledToken
from crosspool.deployment.preflight import check_slices
from crosspool.models.directory import ModelDirectory, read_model_dir
from crosspool.models.families.registry import FAMILIES, spec_from_config
from tests.support.drawn_configs import Draws, drawn_config
from tests.support.monolithic import MonolithicModel
from tests.support.tiny_models import tiny_config, write_tiny_model

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.backends.cuda.worker_pair import Pair, decode_step, greedy, prefill_step

DRAWS = int(os.environ.get("FAMILY_DRAWS", "20"))
SEED = int(os.environ.get("FAMILY_SEED", "0"))
LARGEST_GAP = 0.1
"""Of the logarithm of a token's probability: bfloat16 makes 0.03 of these shapes, attention without its sinks 1.5."""
NEAR_TIE = 0.01
"""Of a router's score: experts so close may be chosen otherwise in bfloat16, and then all behind them differs."""


def takes(family: str, seed: int, num_ranks: int) -> bool:
    spec = spec_from_config(tiny_config(family, **drawn_config(family, seed)))
    try:
        check_shapes(spec)
        check_slices(spec, num_ranks)
    except ValueError:
        return False
    return True


@pytest.mark.soak
@pytest.mark.judge
@pytest.mark.triton
@pytest.mark.timeout(0)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_drawn_models_say_what_numpy_says(tmp_path, monkeypatch, family, num_ranks):
    for seed in islice((seed for seed in count(SEED) if takes(family, seed, num_ranks)), DRAWS):
        draws, config = Draws(family, seed), drawn_config(family, seed)
        path = write_tiny_model(tmp_path / str(seed), family, seed=seed, dtype="bfloat16", tokenizer=False, **config)
        directory = read_model_dir(path)
        prompt = [draws.integer(0, config["vocab_size"] - 1) for _ in range(draws.integer(5, 40))]
        pair = Pair(directory, num_ranks, route=draws.one_of("ffn", "kv"))
        sampled = decoded(pair, directory, prompt, 5)
        tokens = [each.token_id for each in sampled]
        with monkeypatch.context() as patched:
            margins = watched_margins(patched)
            rows = MonolithicModel.load(directory).trace(prompt + tokens)[1][len(prompt) - 1 : -1]
        rows = rows - rows.max(axis=1, keepdims=True)
        expected = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        gaps = [float(abs(each.logprob - row[each.token_id])) for each, row in zip(sampled, expected, strict=True)]
        assert max(gaps) < LARGEST_GAP or min(margins, default=1.0) < NEAR_TIE, (seed, gaps, margins)


def decoded(pair: Pair, directory: ModelDirectory, prompt: list[int], num_tokens: int) -> list[SampledToken]:
    """Greedy tokens with their logarithmic probabilities, the prompt's step first."""
    sampled = list(pair.run(prefill_step(directory, prompt, 1, greedy(num_logprobs=0))))
    for idx in range(num_tokens - 1):
        sampled += pair.run(decode_step({1: len(prompt) + idx}, idx + 2))
    return sampled


def watched_margins(monkeypatch) -> list[float]:
    """Of every choice from now on: how much better the last chosen is than the first that is not, relatively."""
    choose, margins = router.top_ids, []

    def top_ids(scores, top_k):
        ordered = np.sort(np.atleast_2d(scores), axis=-1)[:, ::-1]
        if top_k < ordered.shape[1]:
            last, next_ = ordered[:, top_k - 1], ordered[:, top_k]
            margins.append(float(((last - next_) / np.maximum(np.abs(last), 0.2)).min()))
        return choose(scores, top_k)

    monkeypatch.setattr(router, "top_ids", top_ids)
    return margins
