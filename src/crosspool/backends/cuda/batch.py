"""The rows of a step as the KV worker runs them: one row a token, with its position and its sequence's block table."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crosspool.backends.numpy.sampler import SamplingRow
from crosspool.backends.numpy.sequences import Sequence, row_slots
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepRow

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row that draws a token: `token` is the index in the step of the token whose logits it needs."""

    row: int
    token: int


class Batch:
    """One step's tokens in row order. Nothing of it is visible to other steps before `commit`.

    Raises ValueError for rows that do not fit what the rank knows: unknown sequences, missing pages.
    """

    def __init__(self, step: StepDescriptor, sequences: Mapping[int, Sequence], page_tokens: int) -> None:
        self.rows: tuple[StepRow, ...] = step.rows
        self.tables: list[IntArray] = []  # of each row, (frames_per_page, pages)
        self.sampled: list[SampledRow] = []
        self._sequences: list[Sequence] = []
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for idx, row in enumerate(step.rows):
            sequence = sequences.get(row.sequence_id)
            if sequence is None:
                raise ValueError(f"sequence {row.sequence_id} is not known here; send it in the step's `joining`")
            table = sequence.block_table(row)
            end = row.num_cached_tokens + row.num_new_tokens
            if end > table.shape[1] * page_tokens:
                row_slots(row, table, len(token_ids), page_tokens)  # raises, naming what is missing
            self._sequences.append(sequence)
            self.tables.append(table)
            token_ids += sequence.tokens_to_run(row)
            positions += range(row.num_cached_tokens, end)
            rows += [idx] * row.num_new_tokens
            if row.sample:
                self.sampled.append(SampledRow(idx, len(rows) - 1))
        if len(token_ids) != step.header.num_tokens or not token_ids:
            raise ValueError(f"the step's rows hold {len(token_ids)} tokens, its header says {step.header.num_tokens}")
        self.token_ids: IntArray = np.array(token_ids, dtype=np.int64)
        self.positions: IntArray = np.array(positions, dtype=np.int64)
        self.row_of_token: IntArray = np.array(rows, dtype=np.int64)

    def num_rows_of(self, start: int, stop: int) -> int:
        """Rows that the tokens [start, stop) belong to."""
        return int(self.row_of_token[stop - 1] - self.row_of_token[start]) + 1

    def sampling_row(self, sampled: SampledRow) -> SamplingRow:
        return self._sequences[sampled.row].sampling_row(self.rows[sampled.row])

    def commit(self, tokens: Mapping[int, SampledToken]) -> None:
        """Make the step's outcome visible: block tables, and the SampledToken of each row that drew one."""
        for idx, (sequence, row, table) in enumerate(zip(self._sequences, self.rows, self.tables, strict=True)):
            sequence.commit(row, table, tokens.get(idx))
