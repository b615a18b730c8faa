"""StepRows: the rows of one step as a KV rank sees them, with their sequences, block tables and slots."""

from collections.abc import Mapping

import numpy as np

from crosspool.backends.base import IntArray
from crosspool.backends.numpy.kv_cache import StepSlots
from crosspool.backends.sequences.row_slots import row_slots
from crosspool.backends.sequences.sequence import Sequence, sequence_of
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepRow


class StepRows:
    """Nothing of a step is visible to other steps before `commit`.

    Raises ValueError for rows that do not fit what the rank knows: unknown sequences, missing pages.
    """

    def __init__(self, step: StepDescriptor, sequences: Mapping[int, Sequence], page_tokens: int) -> None:
        self.rows = step.rows
        self.sequences: list[Sequence] = []
        self._tables: list[IntArray] = []
        self._page_tokens = page_tokens
        slots = []
        num_tokens = 0
        for row in step.rows:
            sequence = sequence_of(row, sequences)
            table = sequence.block_table(row)
            self.sequences.append(sequence)
            self._tables.append(table)
            slots.append(row_slots(row, table, num_tokens, page_tokens))
            num_tokens += row.num_new_tokens
        if num_tokens != step.header.num_tokens or not num_tokens:
            raise ValueError(f"the step's rows hold {num_tokens} tokens, its header says {step.header.num_tokens}")
        self.slots = StepSlots.of(slots, page_tokens)

    def follow(self) -> None:
        """Go on to the next step of a run: each row one token further, on pages that came with the first step."""
        self.rows = tuple([_next_row(row) for row in self.rows])
        numbered = enumerate(zip(self.rows, self._tables, strict=True))
        self.slots = StepSlots.of(
            [row_slots(row, table, idx, self._page_tokens) for idx, (row, table) in numbered], self._page_tokens
        )

    def token_ids(self) -> IntArray:
        """(num_tokens,) the tokens to run. Raises ValueError where a row has fewer or more of them than it says."""
        token_ids: list[int] = []
        for row, sequence in zip(self.rows, self.sequences, strict=True):
            tokens = sequence.tokens_to_run(row)
            if len(tokens) != row.num_new_tokens:
                raise ValueError(
                    f"sequence {row.sequence_id} has {len(tokens)} tokens to run, its row says {row.num_new_tokens}"
                )
            token_ids += tokens
        return np.array(token_ids, dtype=np.int64)

    def ended(self, tokens: Mapping[int, SampledToken]) -> set[int]:
        """The rows that drew, among `tokens` by row, one of their stop tokens."""
        return {idx for idx, token in tokens.items() if self.sequences[idx].ends_with(self.rows[idx], token.token_id)}

    def end_run(self, num_steps: int) -> None:
        """The run ends with this step, though `num_steps` more were asked for: its sequences have all ended."""
        for row, sequence in zip(self.rows, self.sequences, strict=True):
            sequence.fill(row.num_cached_tokens + row.num_new_tokens + num_steps + 1)

    def commit(self, tokens: Mapping[int, SampledToken]) -> None:
        """Make the step's outcome visible: its block tables, and the sampled tokens by row."""
        for idx, (sequence, row, table) in enumerate(zip(self.sequences, self.rows, self._tables, strict=True)):
            sequence.commit(row, table, tokens.get(idx))


def _next_row(row: StepRow) -> StepRow:
    return StepRow(
        sequence_id=row.sequence_id,
        token_ids=None,
        num_cached_tokens=row.num_cached_tokens + 1,
        num_new_tokens=1,
        sample=row.sample,
        allowed=row.allowed,
    )
