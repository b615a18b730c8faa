"""What the KV worker remembers of a sequence between steps: its tokens, its block table, its random numbers."""

import math
from collections.abc import Mapping

import numpy as np

from crosspool.backends.base import IntArray
from crosspool.backends.sequences.page_reader import PageReader
from crosspool.backends.sequences.philox import UniformStream
from crosspool.backends.sequences.sampler import SamplingRow
from crosspool.core import SampledToken
from crosspool.scheduler.step import NewSequence, StepRow


class Sequence:
    """One sequence. Everything is addressed by position, so that running the same row twice changes nothing."""

    def __init__(
        self, new: NewSequence, model: str, frames_per_page: int, vocab_size: int, pages: PageReader | None = None
    ) -> None:
        """`pages` says what frame numbers mean on this rank; without it there is but one."""
        self.model = model
        self.sampling = new.sampling
        self.token_ids = [*new.prompt_token_ids, *new.output_token_ids]
        self._sequence_id = new.sequence_id
        self._num_prompt_tokens = len(new.prompt_token_ids)
        self.has_ended = False  # with one of its stop tokens, within a run
        is_plain = new.sampling.num_logprobs is None and not new.sampling.changes_logits
        self._plain_from = len(new.prompt_token_ids) + new.sampling.min_tokens if is_plain else math.inf
        self._uniform = UniformStream(new.sampling.seed)
        self._pages = pages or PageReader(model=model, frames_per_page=frames_per_page)
        self._table = self._pages.empty()
        if self.token_ids and not (min(self.token_ids) >= 0 and max(self.token_ids) < vocab_size):
            wrong = next(token for token in self.token_ids if not 0 <= token < vocab_size)
            raise ValueError(f"token id {wrong} is not in the vocabulary of {model}; ids lie in 0..{vocab_size - 1}")

    def block_table(self, row: StepRow, known: IntArray | None = None) -> IntArray:
        """(frames_per_page, pages) with the row's new pages written in; the sequence's own is left as it is.

        known: the table as it will be once the step before has ended.
        """
        known = self._table if known is None else known
        if not row.new_pages:
            return known
        if row.first_new_page > known.shape[1]:
            raise ValueError(
                f"page {row.first_new_page} of sequence {self._sequence_id} comes after the {known.shape[1]} "
                "pages known here; send those between too"
            )
        entries = self._pages.entries(row.new_pages, self._sequence_id)
        end = row.first_new_page + len(row.new_pages)
        table = np.zeros((len(known), max(end, known.shape[1])), dtype=np.int64)
        table[:, : known.shape[1]] = known
        table[:, row.first_new_page : end] = entries
        return table

    def tokens_to_run(self, row: StepRow) -> tuple[int, ...] | list[int]:
        """The row's tokens; in decode, those at its positions."""
        if row.token_ids is not None:
            return row.token_ids
        return self.token_ids[row.num_cached_tokens : row.num_cached_tokens + row.num_new_tokens]

    def sampling_row(self, row: StepRow) -> SamplingRow:
        return SamplingRow(
            self._sequence_id,
            self.sampling,
            self.token_ids,
            self._num_prompt_tokens,
            row.num_cached_tokens + row.num_new_tokens,
            self._uniform,
            row.allowed,
        )

    def is_plain(self, row: StepRow) -> bool:
        """Whether the row's token depends on no more than its untouched logits, which nobody else asks for."""
        return row.allowed is None and row.num_cached_tokens + row.num_new_tokens >= self._plain_from

    def ends_with(self, row: StepRow, token_id: int) -> bool:
        """Whether the token that the row drew is one of the sequence's stop tokens, which the engine ends it with."""
        num_output = row.num_cached_tokens + row.num_new_tokens - self._num_prompt_tokens + 1
        return num_output >= self.sampling.min_tokens and token_id in self.sampling.stop_token_ids

    def fill(self, num_tokens: int) -> None:
        """Behind its end any token is as good as another: a row that is under way already must find one."""
        self.has_ended = True
        self.token_ids += self.token_ids[-1:] * (num_tokens - len(self.token_ids))

    def commit(self, row: StepRow, table: IntArray, sampled: SampledToken | None) -> None:
        """Make the step's outcome visible: its block table, and its token at the token's position."""
        self._table = table
        if sampled is not None:
            position = row.num_cached_tokens + row.num_new_tokens
            self.token_ids[position : position + 1] = [sampled.token_id]

    def commit_several(self, row: StepRow, table: IntArray, step: int, token_ids: list[int]) -> None:
        """The same for steps of a run, by the row of its first: one token each, from that of number `step` on."""
        self._table = table
        first = row.num_cached_tokens + row.num_new_tokens + step
        self.token_ids[first : first + len(token_ids)] = token_ids


def sequence_of(row: StepRow, sequences: Mapping[int, Sequence]) -> Sequence:
    """The row's sequence. Raises ValueError where this worker does not know it."""
    sequence = sequences.get(row.sequence_id)
    if sequence is None:
        raise ValueError(f"sequence {row.sequence_id} is not known here; send it in the step's `joining`")
    return sequence
