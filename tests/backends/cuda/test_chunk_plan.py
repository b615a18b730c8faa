"""Pieces, stretches, spans and rounds: which launches a chunk's attention is made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosspool.backends.cuda.chunks.chunk_plan import chunk_plan, is_chunk
from crosspool.backends.cuda.chunks.prefill_blocks import (
    NO_SPANS,
    SpanSizes,
    expanded_rounds,
    frame_round,
    padded_keys,
    span_keys,
    spans,
    stretches,
)
from crosspool.scheduler.step import StepHeader, epoch

SIZES = SpanSizes(keys=(32, 8), rows=(16, 64), min_rows=4)


@given(st.integers(1, 5000), st.integers(1, 60), st.integers(1, 700))
def test_pieces_cover_a_chunk_and_their_crossings_are_a_steps_epochs(num_tokens, num_layers, piece_tokens):
    count = -(-num_tokens // piece_tokens)
    if count > 1023 // num_layers:
        with pytest.raises(ValueError, match="lower max_num_batched_tokens"):
            chunk_plan(num_tokens, 3, num_layers, piece_tokens)
        return
    plan = chunk_plan(num_tokens, 3, num_layers, piece_tokens)
    assert [token for piece in plan.pieces for token in range(piece.start, piece.stop)] == list(range(num_tokens))
    assert all(0 < piece.num_tokens <= piece_tokens for piece in plan.pieces)
    crossings = [plan.crossing(layer, piece) for layer in range(num_layers) for piece in plan.pieces]
    assert crossings == list(range(plan.num_crossings))
    assert epoch(3, 0) <= plan.base + 1
    assert plan.last_epoch < epoch(4, 0)


def test_short_prompts_and_decode_are_no_chunks():
    header = StepHeader(lane=0, model="m", step_seq=1, phase="prefill", num_tokens=33)
    assert is_chunk(header)
    for phase, tokens in (("prefill", 32), ("decode", 64)):
        assert not is_chunk(StepHeader(lane=0, model="m", step_seq=1, phase=phase, num_tokens=tokens))


PARTS = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1, max_size=5)


@given(PARTS, st.sampled_from([SIZES, NO_SPANS]), st.integers(1, 16), st.integers(5, 90))
def test_every_query_meets_every_key_it_sees_once(parts, sizes, block_rows, most_keys):
    """Spans and blocks together, for caches read in frames and for expanded ones."""
    counts = [count for _, count in parts]
    rows = np.repeat(np.arange(len(parts)), counts)
    positions = np.concatenate([np.arange(cached, cached + count) for cached, count in parts])
    found = stretches(rows, positions, sizes)
    assert [(part.position, part.num_rows) for part in found] == [tuple(part) for part in parts]
    seen = {}
    for part in found:
        for span in spans(part, sizes):
            assert span.count in sizes.keys
            assert span.rows >= part.num_rows
            key_rows, keys = span_keys(span)
            assert set(key_rows.tolist()) == {part.table_row}
            for row in range(part.first_row, part.first_row + part.num_rows):
                seen.setdefault(row, []).extend(keys.tolist())
    for rounds in ([frame_round(found, block_rows)], expanded_rounds(found, block_rows, most_keys)):
        met = {row: list(keys) for row, keys in seen.items()}
        for part in rounds:
            expanded = len(part.key_positions)
            assert expanded in (0, padded_keys(expanded))
            assert expanded <= padded_keys(most_keys)
            for first, count, position, table_row, key_row, key_first, key_stop, _ in part.blocks.tolist():
                for row in range(first, first + count):
                    own = position + row - first
                    keys = range(key_first, min(key_stop, own + 1))
                    if expanded:
                        at = [key_row + key - key_first for key in keys]
                        assert part.key_positions[at].tolist() == list(keys)
                        assert set(part.key_table_rows[at].tolist()) <= {table_row}
                    met.setdefault(row, []).extend(keys)
        for row, position in enumerate(positions.tolist()):
            assert sorted(met[row]) == list(range(position + 1))
