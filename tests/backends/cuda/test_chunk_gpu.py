"""Prefill in pieces on a GPU, against the NumPy backend and against the decode kernels."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device.launch import DeviceKernels  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.backends.cuda.chunks import ChunkModel  # noqa: E402
from tests.backends.cuda.decoding import TOLERANCE, assert_close, build_decoder, decode_prompts, relative_error  # noqa: E402
from tests.support.monolithic import MonolithicModel  # noqa: E402
from tests.support.tiny_models import CONFIGS, write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def kernels():
    torch.cuda.set_device(0)
    return DeviceKernels(torch.device("cuda", 0))


@pytest.mark.parametrize("page_tokens", [8, 64])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_prefill_equals_numpy_and_decode(family, page_tokens, kernels, tmp_path):
    directory = read_model_dir(write_tiny_model(tmp_path / family, family, dtype="bfloat16", tokenizer=False))
    rng = np.random.default_rng(2)
    long, short = (rng.integers(1, directory.spec.vocab_size, size=size).tolist() for size in (300, 40))
    model = ChunkModel(kernels, directory, rows=2, room=320, device=kernels.device, page_tokens=page_tokens)
    first_hidden, first_logits = model.run([(0, 0, long[:150]), (1, 0, short)], piece_tokens=70)
    hidden, logits = model.run([(0, 150, long[150:])], piece_tokens=128)
    (long_layers, long_logits), (short_layers, short_logits) = (
        MonolithicModel.load(directory).trace(prompt) for prompt in (long, short)
    )
    for layer, values in enumerate(long_layers):
        assert_close([*first_hidden[layer][:150], *hidden[layer]], values)
        assert_close(first_hidden[layer][150:], short_layers[layer])
    expected = np.stack([long_logits[149], short_logits[39], long_logits[299]])
    assert relative_error(torch.cat([first_logits, logits]), torch.from_numpy(expected)) < 2 * TOLERANCE
    decoder = build_decoder(kernels, directory, 1, 40, kernels.device, page_tokens=page_tokens)
    decoded, _ = decode_prompts(decoder, [short])
    for layer in range(directory.spec.num_layers):
        assert_close([step[layer][0] for step in decoded], first_hidden[layer][150:].numpy())
