"""A prefill rank: whole models beside the pools, which compute chunks of prompts and hand their KV over.

The layers are those of the two workers, on a cache of one layer that lives as long as a chunk. On CPUs every model is
in reach at once; a rank that holds one at a time differs in that alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from crosspool.backends.base import HalfStep, IntArray, LaneLinks, Progress, Wait
from crosspool.backends.numpy.attention_half import AttentionHalf
from crosspool.backends.numpy.ffn_worker import FFNHalf
from crosspool.backends.numpy.kv_cache import LayerCache, StepSlots, new_arena
from crosspool.backends.numpy.matrices import each_released
from crosspool.backends.sequences.row_slots import RowSlots
from crosspool.cluster.base import ModelPlacement
from crosspool.kv_pool.geometry import PageGeometry
from crosspool.models.directory import read_model_dir
from crosspool.models.tensors import weight_bytes
from crosspool.scheduler.step import StepDescriptor, epoch
from crosspool.units import ceil_div
from crosspool.weights_pool.loader import load_attention_weights, load_ffn_weights


@dataclass
class WholeModel:
    """Both halves of a model. ffn: its slices as on the weights ranks, whose sums are added in the same order."""

    half: AttentionHalf
    ffn: tuple[FFNHalf, ...]
    geometry: PageGeometry  # of a page of one layer
    num_pages: int = 0  # that its cache has room for

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.geometry.page_bytes

    def make_room(self, num_pages: int) -> None:
        """All layers share one cache: a chunk goes through them one after another."""
        if num_pages > self.num_pages:
            arena = new_arena(num_pages + 1, self.geometry.frame_bytes)
            layers = self.half.spec.layers
            self.half.caches = tuple(LayerCache(arena, self.geometry, 0, layer.attention) for layer in layers)
            self.num_pages = num_pages


class NumpyPrefillWorker:
    """Implements `backends.base.PrefillWorker`."""

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self._models: dict[str, WholeModel] = {}

    def add_model(self, placement: ModelPlacement, progress: Progress) -> None:
        if self._rank not in placement.prefill_ranks:
            raise ValueError(f"{placement.name} is placed on {placement.prefill_ranks}, not on rank {self._rank}")
        directory, num_slices = read_model_dir(placement.directory), len(placement.weights_ranks)
        spec = directory.spec
        one_layer = PageGeometry(
            num_layers=1,
            elements_per_token_layer=spec.kv_elements_per_token_layer,
            element_bytes=4,
            page_tokens=placement.page_tokens,
            frame_bytes=4 * spec.kv_elements_per_token_layer * placement.page_tokens,
            model=placement.name,
        )
        total = weight_bytes(spec)
        weights = load_attention_weights(directory, np.float32, lambda done, _: progress(min(done, total), total))
        loaded, empty = weights.num_bytes, new_arena(2, one_layer.frame_bytes)  # `make_room` gives it its caches
        layers = each_released(weights.layers)
        half = AttentionHalf(spec, weights.model, layers, empty, replace(one_layer, num_layers=spec.num_layers))
        shares = placement.weights_shares or None
        ffn = []
        for index in range(num_slices):
            before = loaded

            def told(done: int, _: int, before: int = before) -> None:
                progress(min(before + done, total), total)

            part = load_ffn_weights(directory, index, num_slices, np.float32, told, shares)
            loaded += part.num_bytes
            ffn.append(FFNHalf(spec, each_released(part.layers)))
        self._models[placement.name] = WholeModel(half, tuple(ffn), one_layer)

    def run(self, step: StepDescriptor, links: LaneLinks) -> HalfStep[None]:
        header = step.header
        model = self._models.get(header.model)
        if model is None:
            raise ValueError(f"model {header.model!r} is not on rank {self._rank}; it has {sorted(self._models)}")
        (inlet,), (outlet,) = links.inlets.values(), links.outlets.values()
        slots, earlier = slots_of(step, model.geometry.page_tokens)
        model.make_room(max(int(row.frames.max()) for row in slots.rows))
        half, num_layers = model.half, model.half.spec.num_layers
        token_ids = [token for row in step.rows for token in row.token_ids or ()]
        hidden, turns = half.embed(np.array(token_ids, dtype=np.int64)), half.turns(slots.positions)
        frames, offsets = earlier
        for layer, cache in enumerate(half.caches):
            flag = epoch(header.step_seq, layer)
            yield Wait((inlet,), flag)
            cache.write_at(inlet.take(layer, len(offsets), cache.row_width), (frames,), offsets)
            rows = half.attend(layer, hidden, turns, slots)
            outlet.put(layer, flag, cache.read_at(slots.write_frames, slots.write_offsets))
            for ffn in model.ffn:
                hidden += ffn(layer, rows)
        last = [slot.stop - 1 for slot, row in zip(slots.rows, step.rows, strict=True) if row.sample]
        flag = epoch(header.step_seq, num_layers)
        yield Wait((inlet,), flag)
        outlet.put(num_layers, flag, hidden[last])

    def remove_model(self, model: str) -> None:
        self._models.pop(model, None)

    def memory_bytes(self) -> Mapping[str, int]:
        models = list(self._models.values())  # a copy first: another thread may be adding a model
        return {
            "attention_weights": sum(model.half.nbytes for model in models),
            "ffn_weights": sum(part.nbytes for model in models for part in model.ffn),
            "kv_cache": sum(model.cache_bytes for model in models),
        }


def slots_of(step: StepDescriptor, page_tokens: int) -> tuple[StepSlots, tuple[IntArray, IntArray]]:
    """The slots of a chunk's tokens in a cache of its own, pages in turn, and (frame, offset) of all earlier tokens.

    Raises ValueError for a row without tokens, as only decode has.
    """
    rows, frames, offsets = [], [], []
    start, page = 0, 1
    for row in step.rows:
        if row.token_ids is None or len(row.token_ids) != row.num_new_tokens:
            raise ValueError(f"sequence {row.sequence_id} brings no tokens; a prefill rank runs prompts only")
        num_pages = ceil_div(row.num_cached_tokens + row.num_new_tokens, page_tokens)
        table = np.arange(page, page + num_pages, dtype=np.int64)[None]
        rows.append(RowSlots(start, start + row.num_new_tokens, row.num_cached_tokens, table))
        pages, places = np.divmod(np.arange(row.num_cached_tokens), page_tokens)
        frames.append(table[0][pages])
        offsets.append(places)
        start, page = start + row.num_new_tokens, page + num_pages
    if start != step.header.num_tokens:
        raise ValueError(f"the step's rows hold {start} tokens, its header says {step.header.num_tokens}")
    return StepSlots.of(rows, page_tokens), (np.concatenate(frames), np.concatenate(offsets))
