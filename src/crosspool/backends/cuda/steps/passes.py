"""How a step is cut into passes: both halves compute the same cut from the step's number of tokens alone.

A pass is one run through all layers with at most 32 tokens, on kernels of a fixed number of rows (its bucket). Rows are
tokens: a prefill chunk is a pass whose rows belong to one sequence, since every row's keys are written before any is
read. Passes of a step share its 1,024 epochs, one pass taking as many as the model has layers.
"""

from typing import NamedTuple

from crosspool.scheduler.step import LAYERS_PER_STEP, epoch
from crosspool.units import ceil_div

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32)
"""Rows a captured pass may have. Those that are not in use cost time too: with 17 in 32 a layer takes 14 % longer."""

PASS_TOKENS = BUCKETS[-1]


class Pass(NamedTuple):
    """Tokens [start, stop) of a step, run on kernels of `bucket` rows; flags carry base + layer + 1."""

    start: int
    stop: int
    bucket: int
    base: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def padded(self, of_tokens: list[int]) -> list[int]:
        """The pass's part of what each token of the step has; rows that are not in use repeat the first."""
        if len(of_tokens) == self.bucket:  # then the pass is the whole step
            return of_tokens
        own = of_tokens[self.start : self.stop]
        return own + own[:1] * (self.bucket - len(own))


_BUCKET_OF = [next(bucket for bucket in BUCKETS if bucket >= rows) for rows in range(PASS_TOKENS + 1)]


def bucket_of(num_tokens: int) -> int:
    """The smallest bucket that holds so many rows."""
    return _BUCKET_OF[num_tokens]


def passes(num_tokens: int, step_seq: int, num_layers: int, step: int = 0) -> tuple[Pass, ...]:
    """The passes of a step, or of one of a run's steps, in order.

    Raises ValueError where they need more epochs than a step has.
    """
    count = ceil_div(num_tokens, PASS_TOKENS)
    if num_tokens < 1 or (step + 1) * count > max_passes(num_layers):
        most = max_passes(num_layers) * PASS_TOKENS
        raise ValueError(
            f"a step of {num_tokens} tokens; with {num_layers} layers the CUDA backend runs 1 to {most} a step: "
            "lower max_num_batched_tokens (max_tokens_per_step of the cluster)"
        )
    first = epoch(step_seq, step * count * num_layers) - 1
    if count == 1:
        return (Pass(0, num_tokens, bucket_of(num_tokens), first),)
    starts = range(0, num_tokens, PASS_TOKENS)
    return tuple(
        Pass(start, stop, bucket_of(stop - start), first + idx * num_layers)
        for idx, start in enumerate(starts)
        for stop in (min(start + PASS_TOKENS, num_tokens),)
    )


def max_passes(num_layers: int) -> int:
    """Passes whose epochs fit one step's."""
    return (LAYERS_PER_STEP - 1) // num_layers
