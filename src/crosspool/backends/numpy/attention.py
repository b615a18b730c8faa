"""Softmax attention over cached keys and values, for both attention kinds: decode over a batch, and chunks of a prompt.

Shapes: T tokens, K KV heads, G query heads per KV head, D and V widths of keys and values, n slots seen. Queries come
multiplied by the softmax scale. MLA with absorbed projections is the case K = 1.
"""

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.kv_cache import LayerCache, RowSlots, StepSlots

MAX_SCORES = 1 << 21
"""Scores of a chunk held at once; longer chunks are cut into blocks of queries."""


def attend(
    query: FloatArray, cache: LayerCache, slots: StepSlots, window: int | None = None, sinks: FloatArray | None = None
) -> FloatArray:
    """(T, K, G, V) attention of every row's queries (T, K, G, D) over its own slots, causal, within `window`.

    sinks: (K, G), a logit per head that takes part in the softmax's denominator only.
    """
    if slots.is_decode:
        return _attend_decode(query, cache, slots.rows, window, sinks)
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
    query: FloatArray,
    cache: LayerCache,
    rows: tuple[RowSlots, ...],
    window: int | None,
    sinks: FloatArray | None,
) -> FloatArray:
    """One token a row. The rows' scores lie side by side in one ragged array, so that one softmax serves all."""
    seen = []
    starts = [0]
    for row in rows:
        end = row.first_position + 1
        begin = 0 if window is None or window >= end else end - window
        seen.append(cache.read(row, begin, end))
        starts.append(starts[-1] + end - begin)
    scores = np.empty((*query.shape[1:3], starts[-1]), dtype=np.float32)
    for idx, (keys, _) in enumerate(seen):
        np.matmul(query[idx], keys, out=scores[:, :, starts[idx] : starts[idx + 1]])
    totals = _exp_segments(scores, starts, sinks)
    attended = np.empty((len(rows), *query.shape[1:3], seen[0][1].shape[-1]), dtype=np.float32)
    for idx, (_, values) in enumerate(seen):
        np.matmul(scores[:, :, starts[idx] : starts[idx + 1]], values, out=attended[idx])
    attended /= totals.transpose(2, 0, 1)[..., None]
    return attended


def _exp_segments(scores: FloatArray, starts: list[int], sinks: FloatArray | None) -> FloatArray:
    """Turn scores (K, G, n) into e^(score - its segment's largest), in place; the sums (K, G, segments)."""
    if len(starts) == 2:
        largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
    else:
        largest = np.maximum.reduceat(scores, starts[:-1], axis=-1)
    if sinks is not None:
        np.maximum(largest, sinks[..., None], out=largest)
    scores -= largest if len(starts) == 2 else np.repeat(largest, np.diff(starts), axis=-1)
    np.exp(scores, out=scores)
    if len(starts) == 2:
        totals = np.add.reduce(scores, axis=-1, keepdims=True)
    else:
        totals = np.add.reduceat(scores, starts[:-1], axis=-1)
    if sinks is not None:
        totals += np.exp(sinks[..., None] - largest)
    result: FloatArray = totals
    return result


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
        totals = _exp_segments(scores, [0, end - begin], tiled)
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
