"""How a chunk and its KV cross between a home and a prefill rank: earlier KV in parts, new KV a layer at a time.

Crossing n leads both ways under one number. In a layer the home gives the chunk's earlier slots, as many at once as a
channel's slot holds, and the prefill rank answers each part: the last one with the layer's new slots, the others with
their flag alone. After the last layer one more brings the residual stream of rows that sample. The home gives
crossing n + 2 once n is back, so that no slot of either channel is written before it was read.
"""

from dataclasses import dataclass
from itertools import pairwise

from crosspool.backends.cuda.chunks.chunk_plan import ChunkPlan, chunk_plan
from crosspool.scheduler.step import LAYERS_PER_STEP
from crosspool.units import ceil_div

CROSSINGS_AHEAD = 2
"""A channel has two slots."""


@dataclass(frozen=True, slots=True)
class HandedPlan:
    """chunk: the pieces in which the prefill rank computes. parts: [start, stop) of the step's earlier slots, all rows
    of the step one after another; one at least, maybe empty. Flags carry `base` + the crossing's number + 1."""

    chunk: ChunkPlan
    parts: tuple[tuple[int, int], ...]

    @property
    def base(self) -> int:
        return self.chunk.base

    @property
    def num_crossings(self) -> int:
        return self.chunk.num_layers * len(self.parts) + 1

    @property
    def last(self) -> int:
        """The number of the crossing that brings rows to sample from."""
        return self.num_crossings - 1

    @property
    def last_epoch(self) -> int:
        return self.base + self.num_crossings

    def place(self, number: int) -> tuple[int, int]:
        """(layer, index of the part) of a crossing before the last."""
        return divmod(number, len(self.parts))


def handed_plan(num_tokens: int, num_earlier: int, step_seq: int, num_layers: int, most_slots: int) -> HandedPlan:
    """most_slots: that a channel's slot holds. Both ends compute the same plan from the step and their channel.

    Raises ValueError where the chunk's own slots do not fit, or all crossings need more epochs than a step has.
    """
    if num_tokens > most_slots:
        raise ValueError(
            f"a chunk of {num_tokens} tokens, whose channel takes the KV of {most_slots}: lower max_num_batched_tokens"
        )
    count = max(1, ceil_div(num_earlier, most_slots))
    bounds = [num_earlier * idx // count for idx in range(count + 1)]
    plan = HandedPlan(chunk_plan(num_tokens, step_seq, num_layers), tuple(pairwise(bounds)))
    if plan.num_crossings >= LAYERS_PER_STEP:
        raise ValueError(
            f"a chunk behind {num_earlier} tokens crosses {plan.num_crossings} times, and a step has epochs for "
            f"{LAYERS_PER_STEP - 1}: raise max_num_batched_tokens, which channels are sized by, or prefill inline"
        )
    return plan
