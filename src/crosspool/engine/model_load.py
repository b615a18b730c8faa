"""ModelLoad: the queue, live sequences and counters of one model that is being served."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from crosspool.core import FinishReason
from crosspool.engine.queues import ModelQueue
from crosspool.engine.sequence import Sequence, SequenceState
from crosspool.engine.served_model import ServedModel


@dataclass(slots=True)
class ModelLoad:
    """`live`: admitted sequences that have not ended, by id. `lingering`: ended ones whose step is still in flight."""

    model: ServedModel
    queue: ModelQueue
    limit: int
    live: dict[int, Sequence] = field(default_factory=dict)
    lingering: dict[int, Sequence] = field(default_factory=dict)
    draining: bool = False
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_accepted: int = 0
    num_refused: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    @property
    def ranks(self) -> tuple[str, ...]:
        return (self.model.kv_rank, *self.model.weights_ranks)

    @property
    def is_idle(self) -> bool:
        return not (self.live or self.lingering or len(self.queue))

    def in_state(self, state: SequenceState) -> list[Sequence]:
        return [sequence for sequence in self.live.values() if sequence.state is state]

    def unended(self) -> Iterator[Sequence]:
        """Every sequence that still owes its caller an end, live ones first."""
        yield from list(self.live.values())
        yield from list(self.queue)
