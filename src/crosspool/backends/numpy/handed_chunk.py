"""The home's side of a chunk that a prefill rank computes: gives earlier KV, takes the new, samples at the end.

Crossing n carries layer n's KV in either direction, and the one after the last layer the residual stream of the rows
that sample. The home gives the next crossing but one only when it has taken the one before it, so that no slot of
either channel is written before it was read; and it alone writes its pages, so that a prefill rank that comes late or
was given up harms nobody.
"""

import numpy as np

from crosspool.backends.base import FloatArray, HalfStep, LaneLinks, Wait
from crosspool.backends.numpy.attention_step import AttentionStep
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepHeader, epoch

CROSSINGS_AHEAD = 2
"""A channel has two slots."""


def handed_chunk(
    attention: AttentionStep, header: StepHeader, links: LaneLinks, num_sampled: int
) -> HalfStep[tuple[SampledToken, ...]]:
    """Lead the step; its tokens."""
    half, slots = attention.half, attention.slots
    (outlet,), (inlet,) = links.outlets.values(), links.inlets.values()
    num_layers, num_tokens = half.spec.num_layers, header.num_tokens

    def give(number: int) -> None:
        rows = earlier_rows(attention, number) if number < num_layers else np.zeros((0, 1), np.float32)
        outlet.put(number, epoch(header.step_seq, number), rows)

    for number in range(CROSSINGS_AHEAD):
        give(number)
    for layer, cache in enumerate(half.caches):
        yield Wait((inlet,), epoch(header.step_seq, layer))
        rows = inlet.take(layer, num_tokens, cache.row_width)
        cache.write_at(rows, slots.write_frames, slots.write_offsets)
        if layer + CROSSINGS_AHEAD <= num_layers:
            give(layer + CROSSINGS_AHEAD)
    yield Wait((inlet,), epoch(header.step_seq, num_layers))
    attention.hidden = inlet.take(num_layers, num_sampled, half.spec.hidden_size).copy()
    return attention.finish()


def earlier_rows(attention: AttentionStep, layer: int) -> FloatArray:
    """(slots before the chunk's tokens, row) of one layer, of all rows one after another."""
    cache = attention.half.caches[layer]
    parts = [cache.read_earlier(row) for row in attention.slots.rows if row.first_position]
    return np.concatenate(parts) if parts else np.zeros((0, cache.row_width), np.float32)
