"""Chunks of one model's prefill of which no two do the same work: what one fills, the others then find."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from crosspool.engine.prefill_chunks import Chunk
from crosspool.engine.prefix_pages import PrefixPages
from crosspool.engine.sequence import Sequence


def shared_chunks(
    prefix: PrefixPages,
    waiting: Items[Sequence],
    running: Iterable[Chunk],
    cut: Callable[[Items[Sequence]], list[Chunk]],
) -> list[Chunk]:
    """`cut` of `waiting` (a step's chunks), without sequences whose pages others are filling.

    A sequence that has not started leaves its chunk out where another one's, in this step or in one under way
    (`running`), gets at least as far in the page that both lack next. So whoever waits does so for one step at a time
    and loses nothing by it.
    """
    for sequence in waiting:
        if not sequence.joined:
            prefix.catch_up(sequence)
    ahead = list(running)
    left = list(waiting)
    while True:
        chunks = cut(left)
        twins = _twins(prefix, chunks, ahead)
        if not twins:
            return chunks
        left = [sequence for sequence in left if sequence.sequence_id not in twins]


def _twins(prefix: PrefixPages, chunks: Items[Chunk], ahead: Items[Chunk]) -> set[int]:
    """Sequences of `chunks` that had better wait: for one of `ahead`, or for one before them in `chunks`."""
    leading = list(ahead)
    twins: set[int] = set()
    for chunk in chunks:
        if not chunk.sequence.joined and any(_does_for(prefix, other, chunk) for other in leading):
            twins.add(chunk.sequence.sequence_id)
        else:
            leading.append(chunk)
    return twins


def _does_for(prefix: PrefixPages, other: Chunk, chunk: Chunk) -> bool:
    """Whether `other` fills the page that `chunk` starts with, as far as that would fill it."""
    start = chunk.sequence.num_cached_tokens
    page_tokens = chunk.sequence.table.page_tokens
    needed = min(start + chunk.num_tokens, start + page_tokens)
    if other.sequence.num_cached_tokens + other.num_tokens < needed:
        return False
    key = prefix.next_key(chunk.sequence)
    return key is not None and key == prefix.key_at(other.sequence, start // page_tokens)
