"""The StepDescriptor: all a worker needs for its half of one step. Control is data.

Once per step the engine hands a lane one descriptor. The KV worker runs the attention half from it, the FFN workers
their half from its header; the halves meet only in put and wait. A step is idempotent: it rewrites the same slots and
emits tokens only at its end, so after a failure the same rows are sent again under a new `step_seq`.

A descriptor may ask for several decode steps of the same rows, a *run*: each takes the tokens that the one before it
sampled, and the run ends early once every row has drawn one of its stop tokens. Steps of a run are told one by one.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from crosspool.core import SampledToken, SamplingParams

Phase = Literal["prefill", "decode"]

LAYERS_PER_STEP = 1024
"""Epochs of one step; no model has more layers."""


MAX_RUN_ROWS = 32
"""Rows that a run may have: as many as a device takes at once."""

MAX_RUN_STEPS = 32
"""Steps that a run may have: a device's lane holds the records of two such runs."""


def epoch(step_seq: int, layer: int) -> int:
    """The flag value that layer `layer` of step `step_seq` writes. Monotonic in both, compared with >=, never reset."""
    return step_seq * LAYERS_PER_STEP + layer + 1


def run_over(step_seq: int, num_steps: int, num_layers: int) -> int:
    """What a run that ends early raises its flags to: beyond its last layer, below the next step's first.

    Raises ValueError where so many steps do not fit the epochs of one.
    """
    if num_steps * num_layers >= LAYERS_PER_STEP:
        most = (LAYERS_PER_STEP - 1) // num_layers
        raise ValueError(f"a run of {num_steps} steps of {num_layers} layers; at most {most} fit, lower decode_steps")
    return epoch(step_seq, num_steps * num_layers)


class StepHeader(NamedTuple):
    """What both halves see. FFN workers get nothing else and hold no request state."""

    lane: int
    model: str
    step_seq: int  # per lane, starts at 1, never reused; a replay gets a new one
    phase: Phase
    num_tokens: int
    priority: int = 0  # smaller runs first under the `priority` order
    kv_rank: str = "kv0"  # leads the step: the home of its sequences
    num_steps: int = 1  # of a run: decode steps that follow each other by themselves
    prefill_rank: str | None = None  # computes the chunk and hands its KV over; None: both pools compute it
    next_model: str | None = None  # that the prefill rank will probably be asked for next; a hint


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSequence:
    """A sequence the KV worker has not seen (or lost with a dead predecessor)."""

    sequence_id: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # already generated, when a lost sequence is prefilled again
    sampling: SamplingParams


class StepRow(NamedTuple):
    """One sequence's part of a step.

    token_ids: the tokens to run, or None in decode: the token this sequence sampled last, known to the KV worker.
    num_cached_tokens: slots already written, which is the position of the first token run here.
    first_new_page, new_pages: entries to write into the sequence's block table; a page is its list of frames, numbered
    over all KV ranks one after another.
    sample: draw a token after the last one run (false for all but the last prefill chunk).
    allowed: which tokens may be drawn, a bit for each id as in `TokenConstraint.allowed`; None: all.
    """

    sequence_id: int
    token_ids: tuple[int, ...] | None
    num_cached_tokens: int
    num_new_tokens: int
    first_new_page: int = 0
    new_pages: tuple[tuple[int, ...], ...] = ()
    sample: bool = True
    allowed: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDescriptor:
    """One step of one lane: a decode step of a model's running sequences, or a chunk of its prefill."""

    header: StepHeader
    rows: tuple[StepRow, ...]
    joining: tuple[NewSequence, ...] = ()  # sequences whose first row this is

    @property
    def num_steps(self) -> int:
        return self.header.num_steps

    def part(self, idx: int) -> "StepDescriptor":
        """Step `idx` of the run as one of its own; new pages and sequences come with the first."""
        if self.num_steps == 1:
            return self
        header = self.header._replace(num_steps=1)
        return self.advanced(idx, header) if idx else replace(self, header=header)

    def advanced(self, count: int, header: StepHeader | None = None) -> "StepDescriptor":
        """The run without its first `count` steps, which have ended; under `header` where that is given."""
        if count == 0:
            return self
        rows = tuple(
            [row._replace(token_ids=None, num_cached_tokens=row.num_cached_tokens + count) for row in self.rows]
        )
        header = header or self.header._replace(num_steps=self.num_steps - count)
        return StepDescriptor(header=header, rows=rows)

    def replayed(self, step_seq: int) -> "StepDescriptor":
        """The same step under a new sequence number."""
        return replace(self, header=self.header._replace(step_seq=step_seq))


class StepResult(NamedTuple):
    """What the KV worker reports at the end of a step: one sampled token per row with `sample`, in row order.

    Of a run: those of the last step that it ran; the others' were told before.
    """

    lane: int
    step_seq: int
    sampled: tuple[SampledToken, ...]
    attention_s: float = 0.0  # time this worker computed for the step
    wait_s: float = 0.0  # time it had nothing of this step to compute
    ffn_s: float | None = None  # of it, what the weights rank that worked longest computed; None: not told

    @property
    def transfer_s(self) -> float | None:
        """What it waited beyond the FFN's own time: both crossings, and turns of other lanes on the weights ranks."""
        return None if self.ffn_s is None else max(0.0, self.wait_s - self.ffn_s)
