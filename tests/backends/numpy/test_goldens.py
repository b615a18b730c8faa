"""What transformers computed once, without transformers: tests/goldens/make.py made these files."""

from pathlib import Path

import numpy as np
import pytest

from crosspool.core import SamplingParams
from crosspool.models.directory import read_model_dir
from tests.support.monolithic import MonolithicModel
from tests.support.tiny_models import CONFIGS

GOLDENS = Path(__file__).parents[2] / "goldens"
MAX_BYTES = 1_500_000


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_logits_and_greedy_tokens_equal_the_golden(family):
    golden = np.load(GOLDENS / family / "golden.npz")
    model = MonolithicModel.load(read_model_dir(GOLDENS / family), page_tokens=4)
    prompt = golden["prompt"].tolist()
    for chunk in (None, 5, 1):
        layers, logits = model.trace(prompt, chunk)
        assert np.abs(np.stack(layers) - golden["layers"]).max() <= 1e-4
        assert np.abs(logits - golden["logits"]).max() <= 1e-4
    greedy = golden["greedy"].tolist()
    sampling = SamplingParams(max_tokens=len(greedy), temperature=0.0)
    assert model.generate(prompt, sampling, chunk=5) == greedy


def test_goldens_stay_small():
    assert sum(path.stat().st_size for path in GOLDENS.rglob("*") if path.is_file()) <= MAX_BYTES
