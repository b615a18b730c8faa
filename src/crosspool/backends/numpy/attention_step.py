"""The attention half of one step, from descriptor to sampled tokens, between the waits that its driver makes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Protocol

from crosspool.backends.base import FloatArray, HalfStep, LaneLinks
from crosspool.backends.numpy.attention_half import AttentionHalf
from crosspool.backends.numpy.layer_router import KVRouters
from crosspool.backends.numpy.step_rows import StepRows
from crosspool.backends.sequences.page_reader import PageReader
from crosspool.backends.sequences.sampler import sample
from crosspool.backends.sequences.sequence import Sequence
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor


class Exchange(Protocol):
    """What the home of a split model does in place of its own attention: the same, with its shares."""

    def attend(self, layer: int, flag: int) -> HalfStep[FloatArray]:
        """Run one layer's attention; the rows to send to the weights ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """One model on a KV rank that leads its steps. `exchange` begins a step of a model that other ranks share."""

    half: AttentionHalf
    page_tokens: int
    pages: PageReader
    exchange: Callable[["AttentionStep", LaneLinks], Exchange] | None = None
    routers: KVRouters | None = None  # where experts are chosen here


class AttentionStep:
    """One step in flight, led by this rank. Nothing of it is visible to other steps before `finish`.

    Raises ValueError for rows that do not fit what the rank knows: unknown sequences, missing pages.
    """

    def __init__(self, model: Model, step: StepDescriptor, sequences: Mapping[int, Sequence]) -> None:
        self.half = model.half
        self.ended: set[int] = set()  # rows that drew one of their stop tokens
        self._rows = StepRows(step, sequences, model.page_tokens)
        self._begin()

    def follow(self) -> None:
        """Go on to the next step of a run, after `finish`."""
        self._rows.follow()
        self._begin()

    def _begin(self) -> None:
        self.slots = self._rows.slots
        self.turns = self.half.turns(self.slots.positions)
        self.hidden = self.half.embed(self._rows.token_ids())

    def attend(self, layer: int) -> FloatArray:
        """Run one layer's attention; the rows to send to the weights ranks."""
        return self.half.attend(layer, self.hidden, self.turns, self.slots)

    def add(self, partial_sums: Iterable[FloatArray]) -> None:
        """Add the FFN's output: the weights ranks' partial sums, one after another in rank order."""
        for partial_sum in partial_sums:
            self.hidden += partial_sum

    def logits(self) -> FloatArray:
        """(rows that sample, vocabulary), of each row's last token."""
        last = [slots.stop - 1 for slots, row in zip(self.slots.rows, self._rows.rows, strict=True) if row.sample]
        return self.half.logits(self.hidden if len(last) == len(self.hidden) else self.hidden[last])

    def finish(self) -> tuple[SampledToken, ...]:
        """Sample and commit: one token per row with `sample`, in row order.

        Raises ValueError, before anything is committed, where the model computes no numbers.
        """
        sampling = {idx: row for idx, row in enumerate(self._rows.rows) if row.sample}
        sampled: tuple[SampledToken, ...] = ()
        if sampling:
            rows = [self._rows.sequences[idx].sampling_row(row) for idx, row in sampling.items()]
            logits = self.logits()
            sampled = sample(logits, rows)
            _require_numbers(logits, sampled)
        drawn = dict(zip(sampling, sampled, strict=True))
        self._rows.commit(drawn)
        self.ended = self._rows.ended(drawn)
        return sampled

    def end_run(self, num_steps: int) -> None:
        """No more of a run's steps follow, though `num_steps` were asked for: all its sequences have ended."""
        self._rows.end_run(num_steps)


def _require_numbers(logits: FloatArray, sampled: tuple[SampledToken, ...]) -> None:
    """Raise ValueError for a row with NaN among its logits: its argmax, which such a row gets, is one."""
    if any(isnan(logits.item(idx, token.token_id)) for idx, token in enumerate(sampled)):
        raise ValueError("the model's logits are not numbers; its checkpoint or its KV holds NaN or infinity")
