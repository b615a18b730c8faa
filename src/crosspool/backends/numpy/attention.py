"""Softmax attention over cached keys and values, for both attention kinds: decode over a batch, and chunks of a prompt.

Shapes: T tokens, K KV heads, G query heads per KV head, D and V widths of keys and values, n slots seen. Queries come
multiplied by the softmax scale. MLA with absorbed projections is the case K = 1.
"""

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.kv_cache import LayerCache, Ragged, RowSlots, StepSlots

MAX_SCORES = 1 << 21
"""Scores of a chunk held at once; longer chunks are cut into blocks of queries."""

SMALL_PRODUCT = 40_000
"""Multiplications up to which OpenBLAS is quick with a transposed view as right operand; beyond, as left operand."""


def attend(
    query: FloatArray, cache: LayerCache, slots: StepSlots, window: int | None = None, sinks: FloatArray | None = None
) -> FloatArray:
    """(T, K, G, V) attention of every row's queries (T, K, G, D) over its own slots, causal, within `window`.

    sinks: (K, G), a logit per head that takes part in the softmax's denominator only.
    """
    if slots.is_decode:
        return _attend_decode(query, cache, slots, window, sinks)
    parts = [attend_row(query[row.start : row.stop], cache, row, window, sinks) for row in slots.rows]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def attend_row(
    query: FloatArray, cache: LayerCache, row: RowSlots, window: int | None = None, sinks: FloatArray | None = None
) -> FloatArray:
    """The same for one row alone: query holds the row's tokens."""
    begin = 0 if window is None else max(0, row.first_position - window + 1)
    keys, values = cache.read(row, begin, row.num_slots)
    return attend_chunk(query, keys, values, row.first_position - begin, window, sinks)


def _attend_decode(
    query: FloatArray, cache: LayerCache, slots: StepSlots, window: int | None, sinks: FloatArray | None
) -> FloatArray:
    """One token a row. The rows' scores lie side by side in one ragged array, so that one softmax serves all."""
    spans = slots.spans(window)
    if len(spans) == 1:
        keys, values = cache.read(*spans[0])
        scores = _scores(query[0], keys)
        totals = _exp(scores, sinks)
        alone: FloatArray = np.matmul(scores, values)
        alone /= totals
        return alone[None]
    seen = [cache.read(*span) for span in spans]
    ragged = slots.ragged(window)
    scores = np.empty((*query.shape[1:3], ragged.total), dtype=np.float32)
    for idx, (keys, _) in enumerate(seen):
        scores[:, :, ragged.slices[idx]] = _scores(query[idx], keys)
    totals = _exp_ragged(scores, ragged, sinks)
    attended = np.empty((len(seen), *query.shape[1:3], seen[0][1].shape[-1]), dtype=np.float32)
    for idx, (_, values) in enumerate(seen):
        np.matmul(scores[:, :, ragged.slices[idx]], values, out=attended[idx])
    attended /= totals.transpose(2, 0, 1)[..., None]
    return attended


def _scores(query: FloatArray, keys: FloatArray) -> FloatArray:
    """(K, G, n) from one token's query (K, G, D) and keys (K, D, n), which lie in memory as (K, n, D)."""
    if query[0].size * keys.shape[-1] <= SMALL_PRODUCT:
        small: FloatArray = np.matmul(query, keys)
        return small
    large: FloatArray = np.matmul(keys.swapaxes(1, 2), np.ascontiguousarray(query.swapaxes(1, 2)))
    return large.swapaxes(1, 2)


def _exp(scores: FloatArray, sinks: FloatArray | None) -> FloatArray:
    """Turn scores (K, q, n) into e^(score - largest), in place; the sums (K, q, 1), each with its sink (K, q)."""
    largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
    if sinks is not None:
        np.maximum(largest, sinks[..., None], out=largest)
    scores -= largest
    np.exp(scores, out=scores)
    totals: FloatArray = np.add.reduce(scores, axis=-1, keepdims=True)
    if sinks is not None:
        totals += np.exp(sinks[..., None] - largest)
    return totals


def _exp_ragged(scores: FloatArray, ragged: Ragged, sinks: FloatArray | None) -> FloatArray:
    """The same for rows side by side: scores (K, G, total), sums (K, G, rows)."""
    largest = np.maximum.reduceat(scores, ragged.starts, axis=-1)
    if sinks is not None:
        np.maximum(largest, sinks[..., None], out=largest)
    scores -= np.repeat(largest, ragged.lengths, axis=-1)
    np.exp(scores, out=scores)
    totals: FloatArray = np.add.reduceat(scores, ragged.starts, axis=-1)
    if sinks is not None:
        totals += np.exp(sinks[..., None] - largest)
    return totals


def attend_chunk(
    query: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    num_before: int,
    window: int | None = None,
    sinks: FloatArray | None = None,
) -> FloatArray:
    """(T, K, G, V): consecutive queries (T, K, G, D) over keys (K, D, n) and values (K, n, V), n = num_before + T.

    Query t sees slots up to num_before + t, of these the last `window`.
    """
    num_tokens, num_kv_heads, group, width = query.shape
    attended = np.empty((num_tokens, num_kv_heads, group, values.shape[-1]), dtype=np.float32)
    block = max(1, MAX_SCORES // (num_kv_heads * group * keys.shape[-1]))
    for start in range(0, num_tokens, block):
        stop = min(start + block, num_tokens)
        end = num_before + stop
        begin = 0 if window is None else max(0, num_before + start - window + 1)
        stacked = query[start:stop].transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, width)
        scores = np.matmul(stacked, keys[:, :, begin:end])
        num_queries = stop - start
        _mask(scores.reshape(num_kv_heads, num_queries, group, -1), num_before + start - begin, window)
        tiled = None if sinks is None else np.tile(sinks, (1, num_queries))
        totals = _exp(scores, tiled)
        result = np.matmul(scores, values[:, begin:end])
        result /= totals
        attended[start:stop] = result.reshape(num_kv_heads, num_queries, group, -1).transpose(1, 0, 2, 3)
    return attended


def _mask(scores: FloatArray, first: int, window: int | None) -> None:
    """Put -inf, in place, on slots a query may not see. scores: (K, t, G, n); query i stands at slot `first + i`."""
    num_tokens, num_slots = scores.shape[1], scores.shape[3]
    if num_tokens > 1:
        later = np.triu(np.full((num_tokens, num_tokens), -np.inf, dtype=np.float32), 1)
        scores[..., first:] += later[:, None, :]
    if window is not None and num_slots > window:
        standing = np.arange(first, first + num_tokens)[:, None]
        earlier = np.where(np.arange(num_slots) <= standing - window, np.float32(-np.inf), np.float32(0))
        scores += earlier[:, None, :]
