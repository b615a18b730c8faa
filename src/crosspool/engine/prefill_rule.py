"""Which tokens of one model may share a prefill step."""

from collections.abc import Iterable
from dataclasses import dataclass

from crosspool.engine.prefill_chunks import Chunk, prefill_chunks
from crosspool.engine.sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRule:
    """Cuts steps from waiting sequences.

    max_tokens: of a step. rerun_tokens: of a step that runs generated tokens again, whose KV was lost: as few as the
    backend runs through decode's kernels; 0: they are prefilled as prompts are.
    are_apart: a step runs one prompt alone, so that its cut, and with it every bit, is a matter of the prompt alone. Of
    generated tokens a step then runs one of each sequence, as they were made: rows of one sequence take other kernels.
    """

    max_tokens: int
    rerun_tokens: int = 0
    are_apart: bool = False

    def chunks(self, sequences: Iterable[Sequence], led: int | None = None) -> list[Chunk]:
        """The next step. led: the sequence that was the oldest in the model's last step and had a part in it.

        Where some may not share a step with the oldest, it leads every second one, and of the others the shortest does.
        """
        by_age = sorted(sequences, key=lambda sequence: sequence.sequence_id)
        if not by_age:
            return []
        oldest = by_age[0]
        others = [sequence for sequence in by_age[1:] if not self._may_share(oldest, sequence)]
        if oldest.sequence_id != led or not others:
            return self._step(oldest, by_age)
        return self._step(
            min(others, key=lambda sequence: (sequence.num_uncached_tokens, sequence.sequence_id)), others
        )

    def _step(self, leader: Sequence, sequences: list[Sequence]) -> list[Chunk]:
        members = [each for each in sequences if each is leader or self._may_share(leader, each)]
        if self._is_rerun(leader):
            if self.are_apart:
                others = [each for each in members if each is not leader][: self.rerun_tokens - 1]
                return [Chunk(each, 1) for each in members if each is leader or each in others]
            return prefill_chunks(members, self.rerun_tokens)
        return prefill_chunks(members, self.max_tokens, ends_with_prompt=self.rerun_tokens > 0)

    def _may_share(self, one: Sequence, other: Sequence) -> bool:
        if self._is_rerun(one) or self._is_rerun(other):
            return self._is_rerun(one) and self._is_rerun(other)
        return not self.are_apart

    def _is_rerun(self, sequence: Sequence) -> bool:
        """Whether what it runs next are generated tokens, in steps of their own."""
        return self.rerun_tokens > 0 and sequence.num_cached_tokens >= sequence.num_prompt_tokens
