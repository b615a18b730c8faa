"""Softmax attention over cached keys and values, for both attention kinds: decode over a batch, and chunks of a prompt.

Shapes: T tokens, K KV heads, G query heads per KV head, D and V widths of keys and values, n slots seen. Queries come
multiplied by the softmax scale. MLA with absorbed projections is the case K = 1.
"""

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.kv_cache import LayerCache, StepSlots
from crosspool.backends.numpy.spans import Block, Span
from crosspool.backends.sequences.row_slots import RowSlots

MAX_SCORES = 1 << 21
"""Scores of a chunk held at once; longer chunks are cut into blocks of queries."""

FEW_SCORES = 1200
"""Scores of a KV head up to which OpenBLAS takes keys as they lie, a transposed right operand, at full speed."""

SAFE_SCORE = 60.0
SAFE_TOTAL = 1e-20
"""Largest score, and smallest sum of e^score, with which a softmax is exact without subtracting the largest score."""


def attend(
    query: FloatArray, cache: LayerCache, slots: StepSlots, window: int | None = None, sinks: FloatArray | None = None
) -> FloatArray:
    """(T, K, G, V) attention of every row's queries (T, K, G, D) over its own slots, causal, within `window`.

    A step of one token may come without the axis T, here and in what goes out.
    sinks: (K, G), a logit per head that takes part in the softmax's denominator only.
    """
    if query.ndim == 3:
        return _attend_one(query, cache, slots.blocks(window)[0].spans[0], sinks)
    if slots.is_decode:
        parts = [_attend_block(query[block.start : block.stop], cache, block, sinks) for block in slots.blocks(window)]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]
    parts = [attend_row(query[row.start : row.stop], cache, row, window, sinks) for row in slots.rows]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def attend_row(
    query: FloatArray, cache: LayerCache, row: RowSlots, window: int | None = None, sinks: FloatArray | None = None
) -> FloatArray:
    """The same for one row alone: query holds the row's tokens."""
    begin = 0 if window is None else max(0, row.first_position - window + 1)
    keys, values = cache.read(row, begin, row.num_slots)
    return attend_chunk(query, keys, values, row.first_position - begin, window, sinks)


def _attend_one(query: FloatArray, cache: LayerCache, span: Span, sinks: FloatArray | None) -> FloatArray:
    """(K, G, V) from the queries (K, G, D) of one token."""
    keys, values = cache.read(span.row, span.begin, span.end)
    weights, totals = softmax_parts(_scores(query, keys), sinks)
    attended: FloatArray = np.matmul(weights, values)
    attended /= totals
    return attended


def _attend_block(query: FloatArray, cache: LayerCache, block: Block, sinks: FloatArray | None) -> FloatArray:
    """(R, K, G, V) from the queries (R, K, G, D) of R rows with one token each: one product and one softmax for all."""
    if len(block.spans) == 1:
        return _attend_one(query[0], cache, block.spans[0], sinks)[None]
    keys, values = cache.read_block(block)
    scores = _scores(query, keys)
    if block.hidden is not None:
        scores += block.hidden
    weights, totals = softmax_parts(scores, sinks)
    attended: FloatArray = np.matmul(weights, values)
    attended /= totals
    return attended


def _scores(query: FloatArray, keys: FloatArray) -> FloatArray:
    """(..., K, G, n), a new array, from queries (..., K, G, D) and keys (..., K, D, n), in memory (..., K, n, D).

    Many scores are made with the keys on the left: OpenBLAS may take five times as long with a transposed view right.
    """
    if query.shape[-2] * keys.shape[-1] <= FEW_SCORES:
        scores: FloatArray = np.matmul(query, keys)
        return scores
    scores = np.matmul(keys.swapaxes(-1, -2), query.swapaxes(-1, -2).copy())
    return scores.swapaxes(-1, -2).copy()


def softmax_parts(scores: FloatArray, sinks: FloatArray | None) -> tuple[FloatArray, FloatArray]:
    """Softmax over the last axis as weights (..., q, n) and what to divide by, (..., q, 1). May overwrite `scores`.

    sinks: (..., q), a further score of each row that counts in the sum only. Where no score is so large, and no row's
    scores are so small, that e^score leaves float32's range, the largest need not be subtracted first.
    """
    if sinks is None and scores.item(scores.argmax()) < SAFE_SCORE:
        weights = np.exp(scores)
        totals: FloatArray = np.add.reduce(weights, axis=-1, keepdims=True)
        if totals.item(totals.argmin()) > SAFE_TOTAL:
            return weights, totals
    return scores, exp_in_place(scores, sinks)


def exp_in_place(scores: FloatArray, sinks: FloatArray | None) -> FloatArray:
    """Turn scores (..., q, n) into e^(score - largest); the sums (..., q, 1), each with its sink (..., q)."""
    largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks[..., None])
    scores -= largest
    np.exp(scores, scores)
    totals: FloatArray = np.add.reduce(scores, axis=-1, keepdims=True)
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
        totals = exp_in_place(scores, tiled)
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
