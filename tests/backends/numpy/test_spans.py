"""Blocks of rows: every row is in one, none is padded too much, and what is hidden is what a row does not see."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crosspool.backends.numpy.spans import MAX_GATHERED, MAX_PADDING, Span, blocks
from crosspool.backends.sequences.row_slots import RowSlots


def spans_of(lengths, window, page_tokens):
    frames = iter(range(1, 100_000))
    rows = []
    for idx, length in enumerate(lengths):
        num_pages = (length - 1) // page_tokens + 1
        table = np.array([[next(frames) for _ in range(num_pages)] for _ in range(2)])
        rows.append(RowSlots(idx, idx + 1, length - 1, table))
    return [Span.of(row, window) for row in rows]


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    window=st.sampled_from([None, 1, 5, 700]),
    page_tokens=st.sampled_from([1, 16, 1024]),
)
def test_blocks_hold_every_row_and_hide_what_it_does_not_see(lengths, window, page_tokens):
    spans = spans_of(lengths, window, page_tokens)
    found = list(blocks(spans, page_tokens))
    assert [span for block in found for span in block.spans] == spans
    assert [block.start for block in found] == [0, *(block.stop for block in found[:-1])]
    for block in found:
        seen = [span.end - span.begin for span in block.spans]
        if len(block.spans) == 1:
            continue
        assert len(seen) * max(seen) <= min(MAX_GATHERED, MAX_PADDING * sum(seen))
        hidden = np.zeros((len(seen), block.num_slots)) if block.hidden is None else block.hidden[:, 0, 0]
        for idx, span in enumerate(block.spans):
            first = span.begin // page_tokens * page_tokens
            positions = first + np.arange(block.num_slots)
            assert ((hidden[idx] == 0) == ((positions >= span.begin) & (positions < span.end))).all()
            own = span.row.frames[:, first // page_tokens : (span.end - 1) // page_tokens + 1]
            assert (block.frames[:, idx, : own.shape[1]] == own).all()
            assert not block.frames[:, idx, own.shape[1] :].any()


def test_rows_alike_need_no_padding():
    (block,) = blocks(spans_of([40, 40, 40], None, 16), 16)
    assert block.hidden is None
    assert block.padding == []
    assert block.frames.shape == (2, 3, 3)


def test_a_long_row_is_not_gathered_with_short_ones():
    assert [len(block.spans) for block in blocks(spans_of([9, 10, 900, 11, 8], None, 16), 16)] == [2, 1, 2]
