"""ModelLoad: the queue, live sequences and counters of one model that is being served."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from crosspool.core import FinishReason
from crosspool.engine.queues import ModelQueue
from crosspool.engine.ranks import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState
from crosspool.engine.served_model import ServedModel


@dataclass(slots=True)
class ModelLoad:
    """Sequences by state and id. `lingering`: ended ones whose step is still in flight."""

    model: ServedModel
    queue: ModelQueue
    prefilling: dict[int, Sequence] = field(default_factory=dict)
    decoding: dict[int, Sequence] = field(default_factory=dict)
    lingering: dict[int, Sequence] = field(default_factory=dict)
    draining: bool = False
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_accepted: int = 0
    num_refused: int = 0
    num_preempted: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    ranks: tuple[str, ...] = field(init=False)
    needs: dict[str, tuple[str, ...]] = field(init=False)  # by home: the ranks that its steps need

    def __post_init__(self) -> None:
        placement = self.model.placement
        self.ranks = placement.ranks
        self.needs = {home: placement.step_ranks(home) for home in placement.homes}

    def homes_up(self, ranks: RankHealth) -> list[str]:
        """Homes whose steps can run: every rank that they need is up."""
        return (
            [home for home, needs in self.needs.items() if ranks.are_up(needs)] if ranks.any_down else list(self.needs)
        )

    def homes_of(self, sequences: Iterable[Sequence], ranks: RankHealth) -> list[str]:
        """Homes of `sequences` whose steps can run: the model has a batch for each."""
        homes = self.homes_up(ranks)
        taken = {sequence.kv_rank for sequence in sequences} if homes else ()
        return [home for home in homes if home in taken]

    def expires_s(self, ranks: RankHealth) -> float | None:
        """When requests stop waiting for a home whose steps can run; None while there is one."""
        if not ranks.any_down:
            return None
        moments = [ranks.expires_s(needs) for needs in self.needs.values()]
        ends = [moment for moment in moments if moment is not None]
        return max(ends) if len(ends) == len(moments) else None

    @property
    def num_live(self) -> int:
        """Sequences that were admitted and have not ended."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def is_idle(self) -> bool:
        return not (self.prefilling or self.decoding or self.lingering or len(self.queue))

    @property
    def owes(self) -> bool:
        """Whether some sequence still owes its caller an end."""
        return bool(self.prefilling or self.decoding or len(self.queue))

    def enter(self, sequence: Sequence, state: SequenceState) -> None:
        """Move a live sequence to `state`, which may be ENDED (it lingers)."""
        self.leave(sequence)
        sequence.state = state
        into = {SequenceState.PREFILLING: self.prefilling, SequenceState.DECODING: self.decoding}
        into.get(state, self.lingering)[sequence.sequence_id] = sequence

    def leave(self, sequence: Sequence) -> None:
        for sequences in (self.prefilling, self.decoding, self.lingering):
            sequences.pop(sequence.sequence_id, None)

    def live(self) -> list[Sequence]:
        return [*self.prefilling.values(), *self.decoding.values()]

    def unended(self) -> Iterator[Sequence]:
        """Every sequence that still owes its caller an end, live ones first."""
        yield from self.live()
        yield from list(self.queue)


def num_decode_batches(loads: Iterable[ModelLoad], ranks: RankHealth) -> int:
    """Decode batches that could run now: one for each model and home of its decoding sequences."""
    return sum(len(load.homes_of(load.decoding.values(), ranks)) for load in loads if load.decoding)
