"""One drawn config, its weights made by transformers: both readings of the config, layers, logits, decoded tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from crosspool.core import SamplingParams
from crosspool.models.directory import read_model_dir
from crosspool.models.families.registry import spec_from_config
from tests.support.drawn_configs import Draws, drawn_config
from tests.support.judge_models import judge_model, layer_outputs
from tests.support.monolithic import MonolithicModel
from tests.support.tiny_models import tiny_config

LARGEST_DIFFERENCE = 1e-4
"""Of the largest value (or one): float32 sums in another order, twice what was seen in a thousand draws and more."""


def compare_draw(path: Path, family: str, seed: int) -> None:
    """Assert that a draw's model says here what it says in transformers, in float32; `path` is to be made."""
    overrides, draws = drawn_config(family, seed), Draws(family, seed)
    judge = judge_model(path, family, seed=seed, **overrides)
    directory = read_model_dir(path)  # as transformers spells it
    as_on_the_hub = spec_from_config(tiny_config(family, **overrides))
    assert directory.spec == dataclasses.replace(as_on_the_hub, eos_token_ids=directory.spec.eos_token_ids)
    model = MonolithicModel.load(directory)
    prompt = [draws.integer(0, overrides["vocab_size"] - 1) for _ in range(draws.integer(20, 50))]
    layers, logits = layer_outputs(judge, prompt)
    chunk = draws.integer(1, 20)
    for size in (None, chunk):
        ours, our_logits = model.trace(prompt, size)
        for number, (mine, theirs) in enumerate(zip([*ours, our_logits], [*layers, logits], strict=True)):
            assert _difference(mine, theirs) <= LARGEST_DIFFERENCE, f"output {number} of chunks of {size}"
    tokens = model.generate(prompt, SamplingParams(max_tokens=8, temperature=0.0), chunk=chunk)
    after = layer_outputs(judge, prompt + tokens)[1][len(prompt) - 1 : -1]
    for row, token in zip(after, tokens, strict=True):
        assert row.max() - row[token] <= LARGEST_DIFFERENCE * _size(after), f"decoded {tokens}"


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max()) / _size(theirs)


def _size(values: np.ndarray) -> float:
    return max(1.0, float(np.abs(values).max()))
