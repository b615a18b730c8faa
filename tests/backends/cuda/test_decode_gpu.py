"""Every family's tiny checkpoint, decoded by the CUDA kernels on a GPU and by the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device.launch import DeviceKernels  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.backends.cuda.decoding import assert_decoded, build_decoder, decode_prompts  # noqa: E402
from tests.support.monolithic import MonolithicModel  # noqa: E402
from tests.support.tiny_models import CONFIGS, write_tiny_model  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels():
    return DeviceKernels(torch.device("cuda"))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_decode_equals_the_numpy_backend(family, tmp_path, kernels):
    directory = read_model_dir(write_tiny_model(tmp_path / family, family, dtype="bfloat16", tokenizer=False))
    prompts = np.random.default_rng(1).integers(1, directory.spec.vocab_size, size=(4, 40)).tolist()
    decoder = build_decoder(kernels, directory, 4, 40, kernels.device, page_tokens=8)
    hidden, logits = decode_prompts(decoder, prompts)
    assert_decoded(MonolithicModel.load(directory), prompts, hidden, logits)
