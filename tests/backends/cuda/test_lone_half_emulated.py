"""A lone token's half of a layer of full-size latents, run on the CPU: by clusters of blocks, and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from benchmarks.full_models import full_spec  # noqa: E402
from crosspool.backends.cuda.kv_rank.attention_half import AttentionHalf  # noqa: E402
from crosspool.backends.cuda.loading.weights import random_attention_weights  # noqa: E402
from crosspool.kv_pool.geometry import page_geometry  # noqa: E402
from tests.backends.cuda.decoding import FRAME_BYTES, shuffled_cache  # noqa: E402
from tests.backends.cuda.emulated import EmulatedKernels  # noqa: E402

pytestmark = pytest.mark.judge
CPU = torch.device("cpu")
POSITION = 1


@pytest.mark.parametrize(("name", "heads"), [("glm-4.7-flash", 2), ("deepseek-v2-lite", 13)])
def test_a_lone_tokens_half_has_the_same_bits_without_clusters(name, heads):
    model = full_spec(name, 1)
    layer = replace(model.layers[0], attention=replace(model.layers[0].attention, num_heads=heads))
    spec = replace(model, layers=(layer,), vocab_size=64)
    weights = random_attention_weights(spec, 5, CPU)
    geometry = page_geometry(spec, page_tokens=8, frame_bytes=FRAME_BYTES)

    def attended(has_clusters):
        kernels = EmulatedKernels()
        kernels.has_clusters = has_clusters
        cache = shuffled_cache(geometry, 1, 8, CPU)
        half = AttentionHalf(kernels, spec, weights, cache, 1, one_row_per_sequence=True)
        for position in range(POSITION + 1):
            half.token_ids.fill_(7 + position)
            half.positions.fill_(position)
            half.lengths.fill_(position + 1)
            half.embed()
            half.attend(0)
        return half.residual, [kernel for kernel, _grid, _threads in kernels.launches]

    residual, by_clusters = attended(True)
    without, ran = attended(False)
    assert residual.isfinite().all()
    assert torch.equal(residual, without)
    assert len(by_clusters) == len(ran) - 2 * (POSITION + 1), "two kernels less a layer"
