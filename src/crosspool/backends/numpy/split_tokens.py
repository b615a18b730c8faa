"""Attention of a model whose pages are spread over KV ranks (split `tokens`): the home's side and a share's.

Every layer the home sends each share that has pages of the step the queries and new cache rows of those rows, and takes
back partial attention, which it merges with its own in the order of ranks. A share has no weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from crosspool.backends.base import FloatArray, HalfStep, Inlet, IntArray, LaneLinks, Outlet, Wait
from crosspool.backends.numpy.attention_step import AttentionStep
from crosspool.backends.numpy.kv_cache import Arena, LayerCache, StepSlots, layer_caches
from crosspool.backends.numpy.partial_attention import Partial, PartOfRow, attend_part, merge, pack, unpack
from crosspool.backends.numpy.step_rows import StepRows
from crosspool.backends.sequences.row_slots import RowSlots
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.kv_pool.split import partial_width, query_and_row
from crosspool.models.spec import GQASpec, MLASpec, ModelSpec
from crosspool.scheduler.step import StepHeader, epoch


@dataclass(frozen=True, slots=True)
class PartOfStep:
    """What one KV rank has of a step: the rows with pages there, and the places of their tokens in the batch."""

    rows: tuple[PartOfRow, ...]
    tokens: IntArray

    @classmethod
    def of(cls, slots: StepSlots, number: int, page_tokens: int) -> "PartOfStep":
        """`number` is the rank's, as in the last line of block tables."""
        rows, start = [], 0
        for row, own in _rows_on(slots, number, page_tokens):
            slot_positions = (own[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)
            slot_positions = slot_positions[: slot_positions.searchsorted(row.num_slots)]
            stop = start + row.num_tokens
            here = RowSlots(start, stop, row.first_position, row.frames[:, own])
            rows.append(PartOfRow(here, slots.positions[row.start : row.stop], slot_positions))
            start = stop
        return cls(tuple(rows), _tokens_on(slots, number, page_tokens))

    def attend(self, query: FloatArray, cache: LayerCache, window: int | None) -> Partial:
        """Partial attention of this part's queries (len(tokens), K, G, D)."""
        parts = [attend_part(query[row.slots.start : row.slots.stop], cache, row, window) for row in self.rows]
        return np.concatenate([values for values, _ in parts]), np.concatenate([lse for _, lse in parts])


@dataclass(frozen=True, slots=True)
class _Share:
    """One share's ends and the places of the tokens that it takes part in."""

    tokens: IntArray
    outlet: Outlet
    inlet: Inlet


class TokenExchange:
    """The home's side of one step. `numbers`: of every KV rank, by name; `rank` is the home's own name."""

    def __init__(
        self, step: AttentionStep, links: LaneLinks, page_tokens: int, numbers: Mapping[str, int], rank: str
    ) -> None:
        self._step = step
        self._own = PartOfStep.of(step.slots, numbers[rank], page_tokens)
        self._shares: list[_Share] = []
        for peer, outlet in links.exchange_outlets.items():
            tokens = _tokens_on(step.slots, numbers[peer], page_tokens)
            if len(tokens):
                self._shares.append(_Share(tokens, outlet, links.exchange_inlets[peer]))

    def attend(self, layer: int, flag: int) -> HalfStep[FloatArray]:
        """Run one layer's attention; the rows to send to the weights ranks."""
        step, half = self._step, self._step.half
        attention, cache = half.attention(layer), half.caches[layer]
        x = half.attention_input(layer, step.hidden)
        query, rows = attention.project(x, half.layer_turns(layer, step.turns))
        if self._shares:
            payload = np.concatenate([query.reshape(len(x), -1), rows], axis=1)
            for share in self._shares:
                share.outlet.put(layer, flag, payload[share.tokens])
        cache.write(rows, step.slots)
        num_kv_heads, group = query.shape[1:3]
        parts = []
        if len(self._own.tokens):
            own = self._own.attend(query[self._own.tokens], cache, attention.window)
            parts.append(_placed(own, self._own.tokens, len(x)))
        if self._shares:
            yield Wait(tuple(share.inlet for share in self._shares), flag)
        for share in self._shares:
            answer = share.inlet.take(layer, len(share.tokens), partial_width(attention.spec))
            parts.append(_placed(unpack(answer, num_kv_heads, group), share.tokens, len(x)))
        step.hidden += attention.output(merge(parts, attention.sinks))
        return half.ffn_input(layer, step.hidden)


class TokenShare:
    """A model's share on a KV rank that is not its home: pages, and no weights."""

    nbytes = 0

    def __init__(self, spec: ModelSpec, arena: Arena, geometry: PageGeometry, number: int) -> None:
        self.spec = spec
        self._caches = layer_caches(arena, geometry, spec)
        self._page_tokens = geometry.page_tokens
        self._number = number

    def answers(self, rows: StepRows, header: StepHeader, inlet: Inlet, outlet: Outlet) -> HalfStep[None] | None:
        """Write the home's new cache rows that belong here, and send partial attention back, layer by layer.

        None for a step of whose rows no page lies here: the home does not wait for this rank then.
        """
        part = PartOfStep.of(rows.slots, self._number, self._page_tokens)
        return self._answers(part, rows.slots, header, inlet, outlet) if len(part.tokens) else None

    def _answers(
        self, part: PartOfStep, slots: StepSlots, header: StepHeader, inlet: Inlet, outlet: Outlet
    ) -> HalfStep[None]:
        frames = tuple(line[part.tokens] for line in slots.write_frames)
        offsets = slots.write_offsets[part.tokens]
        for layer, cache in enumerate(self._caches):
            attention, flag = self.spec.layers[layer].attention, epoch(header.step_seq, layer)
            query_width, row_width = query_and_row(attention)
            yield Wait((inlet,), flag)
            payload = inlet.take(layer, len(part.tokens), query_width + row_width)
            cache.write_at(payload[:, query_width:], frames, offsets)
            query = payload[:, :query_width].reshape(len(payload), *_query_shape(attention))
            window = attention.sliding_window if isinstance(attention, GQASpec) else None
            outlet.put(layer, flag, pack(part.attend(query, cache, window)))


def _rows_on(slots: StepSlots, number: int, page_tokens: int) -> Iterator[tuple[RowSlots, IntArray]]:
    """Rows that see slots on the rank of that number, and the indices of their pages there."""
    for row in slots.rows:
        owners = row.frames[-1][: (row.num_slots - 1) // page_tokens + 1]
        own = np.flatnonzero(owners == number)
        if len(own):
            yield row, own


def _tokens_on(slots: StepSlots, number: int, page_tokens: int) -> IntArray:
    """Places in the batch of those rows' tokens."""
    places = [np.arange(row.start, row.stop) for row, _ in _rows_on(slots, number, page_tokens)]
    return np.concatenate(places) if places else np.zeros(0, dtype=np.int64)


def _placed(partial: Partial, tokens: IntArray, num_tokens: int) -> Partial:
    """The partial result of some of a batch's tokens as one of all of them."""
    values, lse = partial
    if len(tokens) == num_tokens:
        return partial
    all_values = np.zeros((num_tokens, *values.shape[1:]), dtype=np.float32)
    all_lse = np.full((num_tokens, *lse.shape[1:]), -np.inf, dtype=np.float32)
    all_values[tokens], all_lse[tokens] = values, lse
    return all_values, all_lse


def _query_shape(attention: GQASpec | MLASpec) -> tuple[int, int, int]:
    """KV heads, query heads of each, and width of a query as it is scored against cache rows."""
    if isinstance(attention, MLASpec):
        return 1, attention.num_heads, attention.kv_elements_per_token
    return attention.num_kv_heads, attention.num_heads // attention.num_kv_heads, attention.head_dim
