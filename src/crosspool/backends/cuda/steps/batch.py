"""The rows of a step as the KV worker runs them: one row a token, with its position and its sequence's block table."""

from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crosspool.backends.base import IntArray
from crosspool.backends.cuda.steps.passes import PASS_TOKENS
from crosspool.backends.cuda.steps.records import STOP_IDS
from crosspool.backends.sequences.row_slots import row_slots
from crosspool.backends.sequences.sampler import SamplingRow
from crosspool.backends.sequences.sequence import Sequence, sequence_of
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepDescriptor, StepRow


class SampledRow(NamedTuple):
    """A row that draws a token: `token` is the index in the step of the token whose logits it needs."""

    row: int
    token: int


class Batch:
    """The tokens of one step, or of a run's first, in row order. Nothing is visible to other steps before `commit`.

    hosted: rows whose tokens the host has to draw. drawn: of the others, those whose token is not their best one.
    Raises ValueError for rows that do not fit what the rank knows: unknown sequences, missing pages.
    """

    def __init__(
        self,
        step: StepDescriptor,
        sequences: Mapping[int, Sequence],
        page_tokens: int,
        before: "Batch | None" = None,
    ) -> None:
        """before: the lane's decode step that has not ended yet: a sequence's token there, from row r, is -1 - r."""
        followed: list[int | None] = [None] * len(step.rows)
        if before is not None:
            places = {row.sequence_id: idx for idx, row in enumerate(before.rows)}
            followed = [places.get(row.sequence_id) for row in step.rows]
        self.follows = sum({1 << place for place in followed if place is not None}) if None not in followed else 0
        self.rows: tuple[StepRow, ...] = step.rows
        self.tables: list[IntArray] = []  # of each row, (frames_per_page, pages)
        self.sampled: list[SampledRow] = []
        self.drawn: list[SampledRow] = []
        self._sequences: list[Sequence] = []
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        hosted: list[int] = []
        for idx, (row, place) in enumerate(zip(step.rows, followed, strict=True)):
            sequence = sequence_of(row, sequences)
            table = sequence.block_table(row, None if before is None or place is None else before.tables[place])
            end = row.num_cached_tokens + row.num_new_tokens
            if end > table.shape[1] * page_tokens:
                row_slots(row, table, len(token_ids), page_tokens)  # raises, naming what is missing
            self._sequences.append(sequence)
            self.tables.append(table)
            token_ids += sequence.tokens_to_run(row) if place is None else [-1 - place]
            positions += range(row.num_cached_tokens, end)
            rows += [idx] * row.num_new_tokens
            if row.sample:
                at = SampledRow(idx, len(rows) - 1)
                self.sampled.append(at)
                if not sequence.is_plain(row):
                    hosted.append(idx)
                elif not sequence.sampling.is_greedy:
                    self.drawn.append(at)
        if len(token_ids) != step.header.num_tokens or not token_ids:
            raise ValueError(f"the step's rows hold {len(token_ids)} tokens, its header says {step.header.num_tokens}")
        self.token_ids, self.positions, self.row_of_token = token_ids, positions, rows
        self.hosted = frozenset(hosted)

    @cached_property
    def runs_on_device(self) -> bool:
        """Whether the device can draw every row's tokens and tell which of them end it: of few stop tokens."""
        if self.hosted or len(self.rows) > PASS_TOKENS:
            return False
        return all([len(sequence.sampling.stop_token_ids) <= STOP_IDS for sequence in self._sequences])

    @cached_property
    def is_all_drawn(self) -> bool:
        """Whether the device draws a token of every row, each of a sequence of its own."""
        return len(self.sampled) == len(self.rows) == len(self.token_ids) and self.runs_on_device

    def stop_ids(self) -> npt.NDArray[np.int32]:
        """(rows, STOP_IDS): what ends each row, of few stop tokens; -1 where there is less."""
        stops = [sequence.sampling.stop_token_ids for sequence in self._sequences]
        return np.array([[*own, *[-1] * (STOP_IDS - len(own))] for own in stops], dtype=np.int32)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Those of all rows."""
        return frozenset().union(*[sequence.sampling.stop_token_ids for sequence in self._sequences])

    def ended(self, tokens: Mapping[int, SampledToken]) -> set[int]:
        """The rows that drew, among `tokens` by row, one of their stop tokens."""
        return {idx for idx, token in tokens.items() if self._sequences[idx].ends_with(self.rows[idx], token.token_id)}

    @property
    def is_over(self) -> bool:
        """Whether all its sequences have ended, as far as it is known here."""
        return all(sequence.has_ended for sequence in self._sequences)

    def last_tokens(self) -> tuple[SampledToken, ...]:
        """What a step of sequences that have ended gives: nobody wants its tokens."""
        pairs = zip(self.rows, self._sequences, strict=True)
        return tuple([SampledToken(row.sequence_id, sequence.token_ids[-1]) for row, sequence in pairs])

    def end_run(self, num_steps: int) -> None:
        """The run ends with this step, though `num_steps` more were asked for: its sequences have all ended."""
        for row, sequence in zip(self.rows, self._sequences, strict=True):
            sequence.fill(row.num_cached_tokens + row.num_new_tokens + num_steps + 1)

    def sampled_in(self, start: int, stop: int) -> list[SampledRow]:
        """Rows that draw a token, of the tokens [start, stop)."""
        if stop - start == len(self.token_ids):
            return self.sampled
        return [row for row in self.sampled if start <= row.token < stop]

    def num_rows_of(self, start: int, stop: int) -> int:
        """Rows that the tokens [start, stop) belong to."""
        return self.row_of_token[stop - 1] - self.row_of_token[start] + 1

    def sampling_row(self, sampled: SampledRow, ahead: int = 0) -> SamplingRow:
        """How a row's token is drawn, or that of a step of its run `ahead` of this one."""
        row = self._sequences[sampled.row].sampling_row(self.rows[sampled.row])
        return row._replace(position=row.position + ahead) if ahead else row

    def commit(self, tokens: Mapping[int, SampledToken]) -> None:
        """Make the step's outcome visible: block tables, and the SampledToken of each row that drew one."""
        for idx, (sequence, row, table) in enumerate(zip(self._sequences, self.rows, self.tables, strict=True)):
            sequence.commit(row, table, tokens.get(idx))

    def commit_ahead(self, step: int, steps: ListOf[ListOf[SampledToken]]) -> None:
        """The same of a run's steps from number `step` on; this batch holds the rows of the first."""
        for idx, (sequence, row, table) in enumerate(zip(self._sequences, self.rows, self.tables, strict=True)):
            sequence.commit_several(row, table, step, [tokens[idx].token_id for tokens in steps])
