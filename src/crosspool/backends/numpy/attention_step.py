"""The attention half of one step, from descriptor to sampled tokens, between the waits that its driver makes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from crosspool.backends.base import FloatArray
from crosspool.backends.numpy.attention_half import AttentionHalf
from crosspool.backends.numpy.kv_cache import StepSlots
from crosspool.backends.numpy.sampler import sample
from crosspool.backends.numpy.sequences import Sequence, row_slots
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor


@dataclass(frozen=True, slots=True)
class Model:
    """One model on a KV rank."""

    half: AttentionHalf
    page_tokens: int
    frames_per_page: int


class AttentionStep:
    """One step in flight. Nothing of it is visible to other steps before `finish`.

    Raises ValueError for rows that do not fit what the rank knows: unknown sequences, missing pages.
    """

    def __init__(self, model: Model, step: StepDescriptor, sequences: Mapping[int, Sequence]) -> None:
        self.half = model.half
        self._rows = step.rows
        self._sequences = []
        self._tables = []
        slots = []
        token_ids: list[int] = []
        for row in step.rows:
            sequence = sequences.get(row.sequence_id)
            if sequence is None:
                raise ValueError(f"sequence {row.sequence_id} is not known here; send it in the step's `joining`")
            table = sequence.block_table(row)
            self._sequences.append(sequence)
            self._tables.append(table)
            slots.append(row_slots(row, table, len(token_ids), model.page_tokens))
            token_ids += sequence.tokens_to_run(row)
        if len(token_ids) != step.header.num_tokens or not token_ids:
            raise ValueError(f"the step's rows hold {len(token_ids)} tokens, its header says {step.header.num_tokens}")
        self._slots = StepSlots.of(slots, model.page_tokens)
        self._turns = self.half.turns(self._slots.positions)
        self.hidden = self.half.embed(np.array(token_ids, dtype=np.int64))

    def attend(self, layer: int) -> FloatArray:
        """Run one layer's attention; the rows to send to the weights ranks."""
        return self.half.attend(layer, self.hidden, self._turns, self._slots)

    def add(self, partial_sums: Iterable[FloatArray]) -> None:
        """Add the FFN's output: the weights ranks' partial sums, one after another in rank order."""
        for partial_sum in partial_sums:
            self.hidden += partial_sum

    def logits(self) -> FloatArray:
        """(rows that sample, vocabulary), of each row's last token."""
        last = [slots.stop - 1 for slots, row in zip(self._slots.rows, self._rows, strict=True) if row.sample]
        return self.half.logits(self.hidden[last])

    def finish(self) -> tuple[SampledToken, ...]:
        """Sample and commit: one token per row with `sample`, in row order."""
        sampling = [idx for idx, row in enumerate(self._rows) if row.sample]
        sampled: tuple[SampledToken, ...] = ()
        if sampling:
            sampled = sample(self.logits(), [self._sequences[idx].sampling_row(self._rows[idx]) for idx in sampling])
        token_of = dict(zip(sampling, sampled, strict=True))
        for idx, (sequence, row, table) in enumerate(zip(self._sequences, self._rows, self._tables, strict=True)):
            sequence.commit(row, table, token_of.get(idx))
        return sampled
