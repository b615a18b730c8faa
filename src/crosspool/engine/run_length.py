"""RunLength: how many decode steps a batch may take by itself, without the engine in between."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from crosspool.engine.kv_pages import KVPages
from crosspool.engine.model_load import ModelLoad, num_decode_batches
from crosspool.engine.ranks import RankHealth
from crosspool.engine.sequence import Sequence
from crosspool.scheduler.step import LAYERS_PER_STEP, MAX_RUN_ROWS, MAX_RUN_STEPS


@dataclass(frozen=True, slots=True)
class RunLength:
    """Bounds runs by `longest` and by what anybody would have to wait for."""

    longest: int
    num_decode_lanes: int
    loads: Mapping[str, ModelLoad]
    kv: KVPages
    ranks: RankHealth

    def of(self, load: ModelLoad, batch: Items[Sequence]) -> int:
        """How many steps the batch may take by itself: one, unless nobody would wait longer for that.

        None of its sequences reaches `max_tokens` or lacks a page within them, and none ends in a way that only the
        engine sees. Others of the model that wait to join, and other models that wait for a lane, come in after each
        step.
        """
        most = min(self.longest, MAX_RUN_STEPS, (LAYERS_PER_STEP - 1) // load.model.spec.num_layers)
        if most == 1 or len(batch) > MAX_RUN_ROWS or load.model.kv_split != "one":
            return 1
        waiting = load.prefilling or not load.queue.is_empty or self.kv.has_stalled
        if waiting or num_decode_batches(self.loads.values(), self.ranks) > self.num_decode_lanes:
            return 1
        for sequence in batch:
            request = sequence.request
            if request.constraint is not None or request.has_stop_strings:
                return 1
            most = min(most, request.sampling.max_tokens - sequence.num_generated_tokens - sequence.num_ahead)
        has_pages = all(self.kv.of(sequence).ensure_slot_ahead(sequence, most) for sequence in batch)
        return max(1, most) if has_pages else 1
