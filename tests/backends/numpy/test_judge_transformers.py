"""Transformers is the judge: in every family each layer's output, the logits and 64 greedy tokens agree, in float32."""

import numpy as np
import pytest

from crosspool.core import SamplingParams
from crosspool.models.directory import read_model_dir
from tests.support.monolithic import MonolithicModel
from tests.support.tiny_models import CONFIGS

pytestmark = pytest.mark.judge
pytest.importorskip("transformers")
pytest.importorskip("torch")

from tests.support.judge_models import VARIANTS, greedy_tokens, judge_model, layer_outputs  # noqa: E402

CASES: dict[str, tuple[str, dict]] = {family: (family, {}) for family in CONFIGS} | VARIANTS
PROMPT = np.random.default_rng(42).integers(1, 512, 45).tolist()
LARGEST_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """(judge, our model) of a case, made once."""
    made = {}

    def get(case):
        if case not in made:
            family, options = CASES[case]
            path = tmp_path_factory.mktemp("judge") / family
            judge = judge_model(path, family, **options)
            made[case] = judge, MonolithicModel.load(read_model_dir(path))
        return made[case]

    return get


def largest_difference(ours, theirs):
    return max(float(np.abs(mine - other).max()) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_layer_and_the_logits_agree(case, judged):
    judge, model = judged(case)
    layers, logits = layer_outputs(judge, PROMPT)
    our_layers, our_logits = model.trace(PROMPT)
    assert logits.std() > 0.3  # flat logits would agree by themselves
    assert largest_difference(our_layers, layers) <= LARGEST_DIFFERENCE
    assert largest_difference([our_logits], [logits]) <= LARGEST_DIFFERENCE


@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("case", CASES)
def test_a46_logits_agree_for_every_chunk_size(case, chunk, judged):
    judge, model = judged(case)
    _, logits = layer_outputs(judge, PROMPT)
    assert largest_difference([model.trace(PROMPT, chunk)[1]], [logits]) <= LARGEST_DIFFERENCE


@pytest.mark.parametrize("case", CASES)
def test_64_greedy_tokens_agree(case, judged):
    judge, model = judged(case)
    expected = greedy_tokens(judge, PROMPT, 64)
    sampling = SamplingParams(max_tokens=64, temperature=0.0)
    assert model.generate(PROMPT, sampling) == expected
    assert model.generate(PROMPT, sampling, chunk=16) == expected
    assert len(set(expected)) > 4  # not one token over and over


def test_a_wrong_weight_is_seen(judged, monkeypatch):
    """Negative control: one projection's rows in another order."""
    judge, model = judged("qwen3_moe")
    layers, _ = layer_outputs(judge, PROMPT)
    attention = model._worker._models["qwen3_moe"].half._attention[1]
    monkeypatch.setattr(attention, "_o", attention._o[:, ::-1])
    assert largest_difference(model.trace(PROMPT)[0], layers) > 0.1
