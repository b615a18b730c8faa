"""Every family's tiny checkpoint, decoded by the CUDA kernels (run on the CPU) and by the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.backends.cuda.decoding import (  # noqa: E402
    TOLERANCE,
    assert_decoded,
    assert_explained,
    build_decoder,
    decode_prompts,
    relative_error,
)
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402
from tests.support.monolithic import MonolithicModel  # noqa: E402
from tests.support.tiny_models import CONFIGS, write_tiny_model  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_decode_equals_the_numpy_backend(family, tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path / family, family, dtype="bfloat16", tokenizer=False))
    prompts = np.random.default_rng(1).integers(1, directory.spec.vocab_size, size=(2, 18)).tolist()
    decoder = build_decoder(EmulatedKernels(), directory, rows=2, tokens=18, device=CPU, page_tokens=8)
    hidden, logits = decode_prompts(decoder, prompts)
    assert_decoded(MonolithicModel.load(directory), prompts, hidden, logits)


def test_slices_of_the_ffn_add_up(tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path / "d", "deepseek_v2", dtype="bfloat16", tokenizer=False))
    prompts = [[5, 9, 200, 31]]
    whole, parts = (
        decode_prompts(build_decoder(EmulatedKernels(), directory, 1, 4, CPU, num_slices=count), prompts)[1]
        for count in (1, 3)
    )
    assert relative_error(torch.stack(parts), torch.stack(whole)) < TOLERANCE


def test_only_a_near_tie_explains_a_row_that_is_off():
    errors, ties = np.full((4, 3, 40), 5e-3), np.zeros((4, 40), dtype=bool)
    errors[1, :, 5:] = 4e-2
    with pytest.raises(AssertionError):
        assert_explained(errors, ties)
    ties[1, 5] = True
    assert_explained(errors, ties)
    errors[2, :, 5:], ties[2, 5] = 4e-2, True
    with pytest.raises(AssertionError):  # two rows of four
        assert_explained(errors, ties)
