"""Tokens as rows of one pass leave the bits of tokens one after another: what a lost KV rank's sequences rely on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.backends.cuda.decoding import build_decoder, decode_prompts  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.support.tiny_models import CONFIGS, write_tiny_model  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")
COUNT = 7


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_pass_over_tokens_of_one_sequence_has_the_bits_of_decode(family, tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path / family, family, dtype="bfloat16", tokenizer=False))
    prompt = np.random.default_rng(1).integers(1, directory.spec.vocab_size, size=COUNT).tolist()
    one = build_decoder(EmulatedKernels(), directory, rows=1, tokens=COUNT, device=CPU, page_tokens=8)
    _, expected = decode_prompts(one, [prompt])
    many = build_decoder(EmulatedKernels(), directory, rows=COUNT, tokens=COUNT, device=CPU, page_tokens=8)
    half = many.attention
    half.one_row_per_sequence = False
    table = half.cache.frame_table
    half.cache = replace(half.cache, frame_table=table[:1].expand_as(table).contiguous())
    half.token_ids.copy_(torch.tensor(prompt, dtype=torch.int32))
    half.positions.copy_(torch.arange(COUNT, dtype=torch.int32))
    half.lengths.copy_(half.positions + 1)
    logits = many.step()
    for position, row in enumerate(expected):
        assert torch.equal(logits[position], row[0])
