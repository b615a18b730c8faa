"""Which model takes a free lane, which rows its step has, and how the step starts."""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lanes import Lane
from crosspool.engine.live_models import LiveModel
from crosspool.engine.sequence import Sequence
from crosspool.scheduler.step import NewSequence, Phase, StepDescriptor, StepHeader, StepRow

DECODE_PRIORITY = 0
PREFILL_PRIORITY = 1


class Turns:
    """Fair turns: whoever waited longest since it last took a lane goes first.

    Between two turns of a model that is always ready, every other model takes at most one turn a lane.
    """

    def __init__(self) -> None:
        self._order: dict[str, None] = {}  # least recently served first

    def add(self, model: str) -> None:
        self._order[model] = None

    def remove(self, model: str) -> None:
        del self._order[model]

    def ready(self, models: Collection[str]) -> list[str]:
        """`models` in the order of their turns."""
        return [model for model in self._order if model in models]

    def take(self, model: str) -> None:
        """`model` has got a lane: it goes to the end."""
        del self._order[model]
        self._order[model] = None


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


def prefill_row(chunk: Chunk) -> StepRow:
    """The row of one chunk; its last token is sampled from only if the prefill ends with it."""
    sequence = chunk.sequence
    first_new_page, new_pages = sequence.table.take_unsent()
    return StepRow(
        sequence_id=sequence.sequence_id,
        token_ids=sequence.uncached(chunk.num_tokens),
        num_cached_tokens=sequence.num_cached_tokens,
        num_new_tokens=chunk.num_tokens,
        first_new_page=first_new_page,
        new_pages=new_pages,
        sample=chunk.is_last,
        allowed=sequence.allowed if chunk.is_last else None,
    )


def decode_row(sequence: Sequence, num_ahead: int = 0) -> StepRow:
    """The row of a sequence whose newest token the KV worker has sampled itself.

    num_ahead: tokens that steps in flight, which come before this one, will give the sequence.
    """
    first_new_page, new_pages = sequence.table.take_unsent()
    return StepRow(
        sequence_id=sequence.sequence_id,
        token_ids=None,
        num_cached_tokens=sequence.num_cached_tokens + num_ahead,
        num_new_tokens=1,
        first_new_page=first_new_page,
        new_pages=new_pages,
        allowed=sequence.allowed,
    )


class StepStart:
    """The one place where lanes get steps that are not replays: turns pass on, and sequences join their home."""

    def __init__(self, turns: Mapping[Phase, Turns], kv: KVPages) -> None:
        self._turns = turns
        self._kv = kv

    def start(
        self,
        lane: Lane,
        live: LiveModel,
        home: str,
        batch: Items[Sequence],
        rows: Items[StepRow],
        now: float,
        num_steps: int = 1,
        prefill_rank: str | None = None,
        next_model: str | None = None,
    ) -> StepDescriptor:
        """`rows`: one for each sequence of the batch, in its order. num_steps: of a run."""
        self._turns[lane.phase].take(live.model.name)
        joining: list[NewSequence] = []
        for sequence in batch:
            if not sequence.joined:
                self._kv.of(sequence).started(sequence)
                sequence.joined = True
                joining.append(sequence.introduction())
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
        header = StepHeader(
            lane=lane.index,
            model=live.model.name,
            step_seq=lane.next_seq(),
            phase=lane.phase,
            num_tokens=sum(row.num_new_tokens for row in rows),
            priority=DECODE_PRIORITY if lane.phase == "decode" else PREFILL_PRIORITY,
            kv_rank=home,
            num_steps=num_steps,
            prefill_rank=prefill_rank,
            next_model=next_model,
        )
        step = StepDescriptor(header=header, rows=tuple(rows), joining=tuple(joining))
        lane.start(step, tuple(batch), now)
        return step
