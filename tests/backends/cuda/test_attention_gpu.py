"""Decode attention on a GPU: one order of sums whatever the batch, and whichever kernels take latents up to values."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.device.launch import DeviceKernels  # noqa: E402
from crosspool.backends.cuda.kernels.attention import AttentionScratch, attention_decode  # noqa: E402
from crosspool.backends.cuda.kernels.attention_variants import num_splits  # noqa: E402
from crosspool.backends.cuda.kernels.combine import takes_up  # noqa: E402
from crosspool.backends.cuda.kernels.gemv import gemv  # noqa: E402
from crosspool.backends.cuda.kernels.rope import RopeTable, mla_input  # noqa: E402
from tests.backends.cuda.attention_cases import ATTENTIONS, one_layer_pages  # noqa: E402
from tests.backends.cuda.decoding import shuffled_cache  # noqa: E402
from tests.backends.cuda.drawn import draw  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "rows"), [("mla_16_heads", 128), ("mla_20_heads", 256)])
def test_latents_taken_up_have_the_same_bits_alone_and_in_a_batch(name, rows):
    spec, kernels = ATTENTIONS[name], DeviceKernels(torch.device("cuda"))
    lengths = [9000, 1, 4096, 700, 4095, 20000, 33, 4033]
    geometry = one_layer_pages(spec, 200)
    cache = shuffled_cache(geometry, len(lengths), 20000, kernels.device)
    cache.frames.view(torch.bfloat16).normal_(generator=torch.Generator("cuda").manual_seed(3))
    splits = num_splits(spec, kernels.num_sms)
    value_up = draw(spec.num_heads, rows, 512, seed=11).cuda()
    shapes = (spec.num_heads, 512), (spec.num_heads * 192,), (576,)
    drawn = [draw(len(lengths), *shape, seed=6).cuda() for shape in shapes]
    norm = draw(512, seed=10).cuda()

    def attended(chosen, up):
        tokens = len(chosen)
        positions = torch.tensor([lengths[row] - 1 for row in chosen], dtype=torch.int32, device="cuda")
        rope = RopeTable.allocate(spec.rope, tokens, kernels.device)
        rope.update(kernels, positions)
        q_latent, q, kv_a = (tensor[chosen].contiguous() for tensor in drawn)
        scratch = AttentionScratch.for_specs({spec}, tokens, kernels.num_sms, kernels.device)
        scratch.partial_o.fill_(float("nan"))
        width = rows if up else 512
        out = torch.full((tokens, spec.num_heads, width), float("nan"), dtype=torch.bfloat16, device="cuda")
        attention_decode(
            kernels,
            spec,
            mla_input(spec, rope, q_latent, q, kv_a, kv_a_norm=norm),
            replace(cache, frame_table=cache.frame_table[chosen].contiguous()),
            0,
            positions,
            positions + 1,
            out,
            scratch,
            splits=splits,
            one_row_per_sequence=True,
            value_up=value_up if up else None,
            overlap=False,
        )
        if up:
            return out
        values = torch.full((tokens, spec.num_heads, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
        gemv(kernels, value_up, out, values)
        return values

    assert torch.equal(attended([0, 1, 2, 3], up=False), attended([3, 2, 1, 0], up=False).flip(0))
    together = attended(list(range(len(lengths))), up=False)  # blocks merge some tokens' splits
    assert torch.equal(attended([0, 1, 2, 3], up=False), together[:4])
    assert not together.isnan().any()
    for row in range(len(lengths)):
        assert takes_up(kernels, value_up, 1)
        for _ in range(20):
            assert torch.equal(attended([row], up=True)[0], together[row])
    assert torch.equal(attended([2, 0], up=True), together[[2, 0]])
