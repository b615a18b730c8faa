"""Attention over a part of a sequence's slots, and the merge of such parts into attention over all of them.

A part's result is what softmax attention over its slots alone would be, and the logarithm of the sum of e^score over
them (log-sum-exp): with these any parts of one softmax add up (online softmax; flash decoding does the same).
Shapes as in `attention.py`: T tokens, K KV heads, G query heads per KV head, D and V widths, n slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosspool.backends.base import FloatArray, IntArray
from crosspool.backends.numpy.attention import MAX_SCORES
from crosspool.backends.numpy.kv_cache import LayerCache
from crosspool.backends.sequences.row_slots import RowSlots

Partial = tuple[FloatArray, FloatArray]
"""Attended values (T, K, G, V) and log-sum-exp (T, K, G): -inf, and values of 0, where a query sees no slot."""


@dataclass(frozen=True, slots=True)
class PartOfRow:
    """One row's slots on this rank, laid out as a sequence of their own.

    slots: its tokens' places among the queries, and the frames of the pages here. positions: of the tokens (T,), and of
    the slots (n,), both ascending.
    """

    slots: RowSlots
    query_positions: IntArray
    slot_positions: IntArray


def attend_part(query: FloatArray, cache: LayerCache, part: PartOfRow, window: int | None = None) -> Partial:
    """One row's queries (T, K, G, D) over the slots here that they may see: causal, within `window`."""
    num_tokens, num_kv_heads, group, _ = query.shape
    block = max(1, MAX_SCORES // (num_kv_heads * group * max(1, len(part.slot_positions))))
    parts = [
        _attend_block(query[start : start + block], part.query_positions[start : start + block], cache, part, window)
        for start in range(0, num_tokens, block)
    ]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([values for values, _ in parts]), np.concatenate([lse for _, lse in parts])


def _attend_block(
    query: FloatArray, positions: IntArray, cache: LayerCache, part: PartOfRow, window: int | None
) -> Partial:
    num_tokens, num_kv_heads, group, width = query.shape
    end = int(part.slot_positions.searchsorted(positions[-1], side="right"))
    begin = 0 if window is None else int(part.slot_positions.searchsorted(positions[0] - window, side="right"))
    if begin >= end:
        nothing = np.full((num_tokens, num_kv_heads, group), -np.inf, dtype=np.float32)
        return np.zeros((num_tokens, num_kv_heads, group, cache.value_width), dtype=np.float32), nothing
    keys, values = cache.read(part.slots, begin, end)
    stacked = query.transpose(1, 0, 2, 3).reshape(num_kv_heads, num_tokens * group, width)
    scores = np.matmul(stacked, keys)
    if num_tokens > 1:
        hidden = _hidden(positions, part.slot_positions[begin:end], window)
        scores.reshape(num_kv_heads, num_tokens, group, -1)[...] += hidden[:, None, :]
    largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
    largest[np.isneginf(largest)] = 0
    scores -= largest
    np.exp(scores, out=scores)
    totals = np.add.reduce(scores, axis=-1, keepdims=True)
    attended = np.matmul(scores, values)
    attended /= np.where(totals > 0, totals, np.float32(1))
    with np.errstate(divide="ignore"):
        lse = np.log(totals) + largest
    by_token = attended.reshape(num_kv_heads, num_tokens, group, -1).transpose(1, 0, 2, 3)
    return by_token, lse.reshape(num_kv_heads, num_tokens, group).transpose(1, 0, 2)


def _hidden(queries: IntArray, slots: IntArray, window: int | None) -> FloatArray:
    """(T, n): 0 where a query may see a slot, else -inf."""
    is_hidden = slots > queries[:, None]
    if window is not None:
        is_hidden |= slots <= queries[:, None] - window
    return np.where(is_hidden, np.float32(-np.inf), np.float32(0))


def merge(parts: Sequence[Partial], sinks: FloatArray | None = None) -> FloatArray:
    """(T, K, G, V) attention over the slots of all parts, added in the order given.

    sinks: (K, G), a logit per head that joins the softmax's denominator only. Every query sees a slot of some part.
    """
    lse = np.stack([own for _, own in parts])
    largest = np.maximum.reduce(lse, axis=0)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    weights = np.exp(lse - largest)
    totals = np.add.reduce(weights, axis=0)
    if sinks is not None:
        totals += np.exp(sinks - largest)
    weights /= totals
    merged: FloatArray = weights[0][..., None] * parts[0][0]
    for weight, (values, _) in zip(weights[1:], parts[1:], strict=True):
        merged += weight[..., None] * values
    return merged


def pack(partial: Partial) -> FloatArray:
    """(T, K * G * (V + 1)): how a partial result crosses."""
    values, lse = partial
    return np.concatenate([values, lse[..., None]], axis=-1).reshape(len(values), -1)


def unpack(rows: FloatArray, num_kv_heads: int, group: int) -> Partial:
    """The partial result that `pack` made."""
    both = rows.reshape(len(rows), num_kv_heads, group, -1)
    return both[..., :-1], both[..., -1]
