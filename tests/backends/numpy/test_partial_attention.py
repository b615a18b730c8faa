"""Partial attention merged by log-sum-exp is attention over all slots, whoever has which of them."""

import numpy as np
import pytest

from crosspool.backends.numpy.kv_cache import LayerCache, RowSlots, new_arena
from crosspool.backends.numpy.partial_attention import PartOfRow, attend_part, merge, pack, unpack
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.spec import GQASpec, RopeSpec

PAGE_TOKENS, NUM_PAGES, HEADS, GROUP, DIM = 4, 6, 2, 3, 8
SPEC = GQASpec(
    num_heads=HEADS * GROUP, num_kv_heads=HEADS, head_dim=DIM, rope=RopeSpec(theta=1e4, dim=DIM), softmax_scale=1.0
)


def a_cache():
    elements = SPEC.kv_elements_per_token
    geometry = PageGeometry(
        num_layers=1,
        elements_per_token_layer=elements,
        element_bytes=4,
        page_tokens=PAGE_TOKENS,
        frame_bytes=4 * elements * PAGE_TOKENS,
    )
    arena = new_arena(NUM_PAGES + 1, geometry.frame_bytes)
    arena.view(np.float32)[:] = np.random.default_rng(0).standard_normal(arena.view(np.float32).shape)
    return LayerCache(arena, geometry, 0, SPEC)


def part_of(pages, num_slots, first, num_tokens):
    """The slots of some of a sequence's pages; page i lies in frame i + 1."""
    own = np.array(pages, dtype=np.int64)
    slots = (own[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
    row = RowSlots(0, num_tokens, first, (own + 1,))
    return PartOfRow(row, np.arange(first, first + num_tokens), slots[slots < num_slots])


def plain(query, cache, first, window, sinks):
    """By definition, in float64."""
    keys, values = cache.read(RowSlots(0, 1, 0, (np.arange(NUM_PAGES) + 1,)), 0, NUM_PAGES * PAGE_TOKENS)
    result = np.zeros(query.shape)
    for token in range(len(query)):
        end = first + token + 1
        begin = 0 if window is None else max(0, end - window)
        for head in range(HEADS):
            exp = np.exp(query[token, head].astype(np.float64) @ keys[head, :, begin:end])
            total = exp.sum(axis=-1) + (0 if sinks is None else np.exp(sinks[head].astype(np.float64)))
            result[token, head] = exp @ values[head, begin:end] / total[:, None]
    return result


@pytest.mark.parametrize("window", [None, 1, 5, 9])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("first", "num_tokens"), [(21, 1), (0, 22), (7, 13), (16, 5)])
def test_parts_of_any_ranks_merge_into_the_whole(first, num_tokens, window, has_sinks):
    rng = np.random.default_rng(first)
    cache, num_slots = a_cache(), first + num_tokens
    query = rng.standard_normal((num_tokens, HEADS, GROUP, DIM)).astype(np.float32)
    sinks = rng.standard_normal((HEADS, GROUP)).astype(np.float32) if has_sinks else None
    num_pages = -(-num_slots // PAGE_TOKENS)
    for num_ranks in (1, 2, 3):
        owners = rng.integers(0, num_ranks, num_pages)
        parts = []
        for rank in range(num_ranks):
            pages = np.flatnonzero(owners == rank)
            if len(pages):
                own = attend_part(query, cache, part_of(pages, num_slots, first, num_tokens), window)
                parts.append(unpack(pack(own), HEADS, GROUP))
        merged = merge(parts, sinks)
        expected = plain(query, cache, first, window, sinks)
        assert np.abs(merged - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_query_that_sees_no_slot_of_a_part_counts_for_nothing_there():
    cache = a_cache()
    query = np.ones((2, HEADS, GROUP, DIM), np.float32)
    values, lse = attend_part(query, cache, part_of([1], 5, 3, 2), None)  # slot 4: the second token's own
    assert (lse[0] == -np.inf).all()
    assert not values[0].any()
    assert np.isfinite(lse[1]).all()


def test_long_chunks_are_cut_and_give_the_same(monkeypatch):
    cache = a_cache()
    query = np.random.default_rng(3).standard_normal((20, HEADS, GROUP, DIM)).astype(np.float32)
    part = part_of([0, 2, 3, 4], 20, 0, 20)
    whole = attend_part(query, cache, part, 7)
    monkeypatch.setattr("crosspool.backends.numpy.partial_attention.MAX_SCORES", 200)
    for one, other in zip(attend_part(query, cache, part, 7), whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
