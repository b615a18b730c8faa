"""Chunks of prefill: how the sequences of one step share its tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

from crosspool.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of one sequence's prefill."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        return self.num_tokens == self.sequence.num_uncached_tokens


def prefill_chunks(sequences: Iterable[Sequence], max_tokens: int, *, ends_with_prompt: bool = False) -> list[Chunk]:
    """Share `max_tokens` among prefilling sequences: half for the oldest, the rest to the shortest, what is left back.

    So a long prompt neither holds up short ones behind it nor is starved by them: it keeps half of the rate it has
    alone. Chunks come in the order of age. ends_with_prompt: no chunk goes on to tokens that were generated.
    """

    def left_of(sequence: Sequence) -> int:
        left = sequence.num_uncached_tokens
        return left - sequence.num_generated_tokens if ends_with_prompt else left

    by_age = sorted(sequences, key=lambda sequence: sequence.sequence_id)
    if not by_age:
        return []
    oldest, others = by_age[0], by_age[1:]
    guaranteed = min(left_of(oldest), max(1, max_tokens // 2))
    left = max_tokens - guaranteed
    shares = {oldest.sequence_id: guaranteed}
    for sequence in sorted(others, key=lambda sequence: (left_of(sequence), sequence.sequence_id)):
        share = min(left_of(sequence), left)
        if share == 0:
            break
        shares[sequence.sequence_id] = share
        left -= share
    shares[oldest.sequence_id] += min(left, left_of(oldest) - guaranteed)
    return [Chunk(s, shares[s.sequence_id]) for s in by_age if s.sequence_id in shares]
