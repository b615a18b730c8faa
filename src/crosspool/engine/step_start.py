"""StepStart: how a step starts in a lane, and the rows that it has."""

from collections.abc import Mapping
from collections.abc import Sequence as Items

from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lanes import Lane
from crosspool.engine.live_models import LiveModel
from crosspool.engine.prefill_chunks import Chunk
from crosspool.engine.sequence import Sequence
from crosspool.engine.turns import Turns
from crosspool.scheduler.step import NewSequence, Phase, StepDescriptor, StepHeader, StepRow

DECODE_PRIORITY = 0
PREFILL_PRIORITY = 1


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
