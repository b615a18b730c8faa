"""Captured spans of a piece on a GPU, against the library's own calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.chunks.prefill_blocks import SpanSizes, spans, stretches  # noqa: E402
from crosspool.backends.cuda.chunks.prefill_piece import Library, span_rows  # noqa: E402
from crosspool.backends.cuda.chunks.span_attention import SpanGraphs  # noqa: E402
from crosspool.backends.cuda.device.queues import own_stream  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


def test_captured_spans_of_two_sequences_equal_the_librarys_own_calls(tmp_path):
    torch.cuda.set_device(0)
    spec = read_model_dir(write_tiny_model(tmp_path / "m", "qwen3_moe", tokenizer=False)).spec
    device, sizes = torch.device("cuda", 0), SpanSizes(keys=(4096, 2048), rows=(1024,), min_rows=512)
    shape = replace(spec.layers[0].attention, num_heads=8, num_kv_heads=2, head_dim=128)
    stream = own_stream(device)
    found = Library(SpanGraphs.capture(shape, sizes, device, {False: stream}))
    rows = torch.tensor([0] * 700 + [1] * 600).numpy()
    positions = torch.cat([torch.arange(6200, 6900), torch.arange(4100, 4700)]).numpy()
    piece = [span for part in stretches(rows, positions, sizes) for span in spans(part, sizes)]
    assert [span.stretch.first_row for span in piece] == [0, 0, 700]
    with torch.cuda.stream(stream):
        q = torch.randn(span_rows(1300, piece), shape.num_heads, shape.head_dim, device=device).bfloat16()
        for span in piece:
            slots = found.slots(span)
            slots.copy_(torch.randn(slots.shape, device=device))
            keys, values = slots.unflatten(1, (2, shape.num_kv_heads, shape.head_dim)).permute(1, 2, 0, 3)
            own = [part.clone() for part in found.run(shape, q, keys, values, span)]
            called = Library().run(shape, q, keys, values, span)
            count = span.stretch.num_rows
            assert torch.equal(own[0][:count], called[0][:count])
            assert torch.equal(own[1][:, :count], called[1][:, :count])
    stream.synchronize()
