"""Prefill in pieces on the CPU: our kernels in the emulator, Triton's in its interpreter, against the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from crosspool.backends.cuda.chunks.prefill_blocks import NO_SPANS, SpanSizes  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.backends.cuda.chunks import ChunkModel  # noqa: E402
from tests.backends.cuda.decoding import TOLERANCE, assert_close, relative_error  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.support.monolithic import MonolithicModel  # noqa: E402
from tests.support.tiny_models import CONFIGS, write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.judge, pytest.mark.triton]

CPU = torch.device("cpu")


QUICK = ("qwen3_moe", "deepseek_v2", "gpt_oss")
"""GQA, MLA, and a sliding window with sinks and biases; the other families take another minute."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(CONFIGS)]
)
def test_prefill_equals_the_numpy_backend(family, tmp_path):
    """Two prompts of unlike length share a step's pieces; a second step goes on behind the cached tokens."""
    directory = read_model_dir(write_tiny_model(tmp_path / family, family, dtype="bfloat16", tokenizer=False))
    rng = np.random.default_rng(2)
    long, short = (rng.integers(1, directory.spec.vocab_size, size=size).tolist() for size in (40, 9))
    model = ChunkModel(EmulatedKernels(), directory, rows=2, room=48, device=CPU)
    first_hidden, first_logits = model.run([(0, 0, long[:23]), (1, 0, short)], piece_tokens=13)
    hidden, logits = model.run([(0, 23, long[23:])], piece_tokens=64)
    reference = MonolithicModel.load(directory)
    (long_layers, long_logits), (short_layers, short_logits) = reference.trace(long), reference.trace(short)
    expected = np.stack([long_logits[22], short_logits[8], long_logits[39]])
    assert relative_error(torch.cat([first_logits, logits]), torch.from_numpy(expected)) < TOLERANCE
    for layer, values in enumerate(long_layers):
        assert_close([*first_hidden[layer][:23], *hidden[layer]], values)
        assert_close(first_hidden[layer][23:], short_layers[layer])


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe_lite"])
def test_keys_far_before_a_stretch_are_the_librarys(family, tmp_path):
    """Spans of two sizes, rounds of few keys: the same as all keys in one walk."""
    directory = read_model_dir(write_tiny_model(tmp_path / family, family, dtype="bfloat16", tokenizer=False))
    prompt, other = (
        np.random.default_rng(seed).integers(1, 500, size=size).tolist() for seed, size in ((3, 58), (4, 5))
    )
    found = []
    for sizes in (NO_SPANS, SpanSizes(keys=(16, 8), rows=(16, 32), min_rows=8)):
        model = ChunkModel(EmulatedKernels(), directory, rows=2, room=64, device=CPU)
        model.run([(0, 0, prompt[:41])], 64, sizes)
        found.append(model.run([(1, 0, other), (0, 41, prompt[41:])], 64, sizes))
    (whole_hidden, whole_logits), (hidden, logits) = found
    assert relative_error(logits, whole_logits) < TOLERANCE
    for layer, values in enumerate(whole_hidden):
        assert_close(hidden[layer], values.numpy())
    assert not torch.equal(hidden[-1], whole_hidden[-1])  # it was another way


def test_slices_of_the_ffn_add_up(tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path / "d", "deepseek_v2", dtype="bfloat16", tokenizer=False))
    prompt = np.random.default_rng(3).integers(1, directory.spec.vocab_size, size=37).tolist()
    whole, parts = (
        ChunkModel(EmulatedKernels(), directory, 1, 40, CPU, num_slices=count).run([(0, 0, prompt)], 16)[1]
        for count in (1, 3)
    )
    assert relative_error(parts, whole) < TOLERANCE
