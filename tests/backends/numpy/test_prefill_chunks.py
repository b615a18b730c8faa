"""A46: a long prompt gives the same logits and the same tokens whatever the chunks it is prefilled in."""

import numpy as np
import pytest

from crosspool.core import SamplingParams
from crosspool.models.directory import read_model_dir
from tests.support.monolithic import MonolithicModel
from tests.support.tiny_models import write_tiny_model

NUM_TOKENS = 3000
FRAME_BYTES = 1 << 20


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite", "qwen3_moe", "gpt_oss"])
def test_a46_chunks_of_a_long_prompt(family, tmp_path):
    path = write_tiny_model(
        tmp_path / family, family, tokenizer=False, num_layers=2, max_position_embeddings=4096, vocab_size=256
    )
    model = MonolithicModel.load(read_model_dir(path), page_tokens=256)
    prompt = np.random.default_rng(0).integers(0, 256, NUM_TOKENS).tolist()
    _, expected = model.trace(prompt, NUM_TOKENS)
    sampling = SamplingParams(max_tokens=32, temperature=0.0)
    tokens = model.generate(prompt, sampling, NUM_TOKENS)
    for chunk in (128, 512, 1024):
        _, logits = model.trace(prompt, chunk)
        assert np.abs(logits - expected).max() <= 1e-4
        assert model.generate(prompt, sampling, chunk) == tokens
