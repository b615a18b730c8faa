"""Spans of a piece by the model's graphs: every sequence of the piece has its own queries in their room."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crosspool.backends.cuda.chunks.prefill_blocks import SpanSizes, spans, stretches  # noqa: E402
from crosspool.backends.cuda.chunks.prefill_piece import Library, span_rows  # noqa: E402
from crosspool.backends.cuda.chunks.span_attention import SpanBuffers, SpanGraphs, full_attention  # noqa: E402
from crosspool.models.directory import read_model_dir  # noqa: E402
from tests.support.tiny_models import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.judge

CPU = torch.device("cpu")
SIZES = SpanSizes(keys=(16, 8), rows=(8, 16), min_rows=4)


class Graphs(SpanGraphs):
    """Computes what a captured graph would, of what lies in the buffers then."""

    def replay(self, rows, count, is_shared):
        return self._run(rows, count)


@pytest.fixture
def shape(tmp_path):
    return read_model_dir(write_tiny_model(tmp_path / "m", "qwen3_moe", tokenizer=False)).spec.layers[0].attention


def library(shape) -> Library:
    return Library(Graphs(shape, SpanBuffers.allocate(shape, SIZES, CPU)))


def spans_of(*rows_at):
    """Of a piece of sequences that have so many tokens at such a position each."""
    rows = torch.tensor([row for row, (count, _) in enumerate(rows_at) for _ in range(count)]).numpy()
    positions = torch.cat([torch.arange(at, at + count) for count, at in rows_at]).numpy()
    return [span for part in stretches(rows, positions, SIZES) for span in spans(part, SIZES)]


def check(shape, found: Library, q, piece) -> None:
    """Each span's own rows as a call without graphs has them."""
    generator = torch.Generator().manual_seed(7)
    for span in piece:
        slots = found.slots(span)
        assert slots is not None
        slots.copy_(torch.randn(slots.shape, generator=generator))
        keys, values = slots.unflatten(1, (2, shape.num_kv_heads, shape.head_dim)).permute(1, 2, 0, 3)
        out, log_sums = found.run(shape, q, keys, values, span)
        own = q[span.stretch.first_row :][: span.stretch.num_rows]
        expected, expected_sums = full_attention(own, keys, values, shape.softmax_scale)
        assert torch.equal(out[: len(own)], expected)
        assert torch.equal(log_sums[:, : len(own)], expected_sums)


def test_each_sequence_of_a_piece_brings_its_queries_to_its_first_span(shape):
    found, piece = library(shape), spans_of((6, 40), (3, 40), (9, 24))
    assert {span.stretch.first_row for span in piece} == {0, 9}, "three rows are too few for spans"
    assert len(piece) > 3, "several spans of a sequence share its queries"
    assert found.queries(span_rows(18, piece), piece) is None
    q = torch.randn(span_rows(18, piece), shape.num_heads, shape.head_dim, generator=torch.Generator().manual_seed(1))
    check(shape, found, q.bfloat16(), piece)


def test_queries_of_a_piece_of_one_sequence_are_made_where_its_spans_find_them(shape):
    found, piece = library(shape), spans_of((6, 40))
    q = found.queries(span_rows(6, piece), piece)
    assert q is not None
    q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(1)))
    check(shape, found, q, piece)
    assert found.queries(6, []) is None, "no span reads them"
    assert found.queries(len(q) + 1, piece) is None, "they do not fit"
