"""LiveModels: the models that ranks have loaded, with their sequences, and how long these may become."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from crosspool.core import FinishReason
from crosspool.engine.config import EngineConfig
from crosspool.engine.forecast import OutputEstimate
from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lengths import context_limit
from crosspool.engine.limit_change import LimitChange
from crosspool.engine.queues import ModelQueue
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState
from crosspool.engine.served_model import ServedModel
from crosspool.errors import CapacityError, UnknownModelError


@dataclass(slots=True)
class LiveModel:
    """A model that its ranks have loaded: its queue, and its sequences by state and id. `lingering`: ended ones whose
    step is still in flight."""

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
            [home for home, needs in self.needs.items() if ranks.are_up(needs, self.model.name)]
            if ranks.any_down
            else list(self.needs)
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
        moments = [ranks.expires_s(needs, self.model.name) for needs in self.needs.values()]
        ends = [moment for moment in moments if moment is not None]
        return max(ends) if len(ends) == len(moments) else None

    @property
    def num_live(self) -> int:
        """Sequences that were admitted and have not ended."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_unended(self) -> int:
        """Sequences that owe their callers an end: live and queued ones."""
        return self.num_live + len(self.queue)

    @property
    def is_idle(self) -> bool:
        return not (self.prefilling or self.decoding or self.lingering or len(self.queue))

    @property
    def owes(self) -> bool:
        """Whether some sequence still owes its caller an end."""
        return self.num_unended > 0

    def enter(self, sequence: Sequence, state: SequenceState) -> None:
        """Move a live sequence to `state`, which may be ENDED (it lingers)."""
        self.leave(sequence)
        sequence.state = state
        into = {SequenceState.PREFILLING: self.prefilling, SequenceState.DECODING: self.decoding}
        into.get(state, self.lingering)[sequence.sequence_id] = sequence

    def leave(self, sequence: Sequence) -> None:
        for sequences in (self.prefilling, self.decoding, self.lingering):
            sequences.pop(sequence.sequence_id, None)

    def live_sequences(self) -> list[Sequence]:
        return [*self.prefilling.values(), *self.decoding.values()]

    def unended(self) -> Iterator[Sequence]:
        """Every sequence that still owes its caller an end, live ones first."""
        yield from self.live_sequences()
        yield from list(self.queue)


def num_decode_batches(live_models: Iterable[LiveModel], ranks: RankHealth) -> int:
    """Decode batches that could run now: one for each model and home of its decoding sequences."""
    return sum(len(live.homes_of(live.decoding.values(), ranks)) for live in live_models if live.decoding)


class LiveModels:
    """Models by name, and their pages. `by_name` stays the same object: everyone who reads it holds it."""

    def __init__(self, config: EngineConfig, estimate: OutputEstimate) -> None:
        self.by_name: dict[str, LiveModel] = {}
        self.kv = KVPages(config, estimate)
        self._config = config

    def of(self, name: str) -> LiveModel:
        """Raises UnknownModelError."""
        if name not in self.by_name:
            served = ", ".join(self.by_name) or "none"
            raise UnknownModelError(f"no model {name!r} is served; served models: {served}")
        return self.by_name[name]

    def context_limit(self, model: ServedModel) -> int:
        """Prompt plus output tokens a request to `model` may ask for. Raises CapacityError if not one page fits."""
        context_limit(model, self._config.num_frames - 1)  # a page larger than the pool says so first
        try:
            num_frames = self.kv.reach(model)
        except ValueError as error:
            raise CapacityError(str(error)) from None
        return context_limit(model, num_frames)

    def set_limits(self, change: LimitChange) -> None:
        """Change what models may hold in the KV pool, at once and as a whole.

        Raises UnknownModelError, and ValueError with the true numbers for limits that cannot be held.
        """
        for name in change.models:
            self.of(name)
        self.kv.set_limits(change)

    def add(self, model: ServedModel) -> None:
        """Serve a model whose ranks have loaded it.

        Raises ValueError for a second one of that name, CapacityError if the pool cannot hold a page of it.
        """
        if model.name in self.by_name:
            raise ValueError(f"model {model.name} is already served; remove it first or give another name")
        self.context_limit(model)
        self.kv.add_model(model)
        queue = ModelQueue(model.name, self._config.max_queue, self._config.max_queue_per_key)
        self.by_name[model.name] = LiveModel(model, queue)

    def remove(self, name: str) -> None:
        """Forget an idle model."""
        live = self.of(name)
        assert live.is_idle, f"model {name} still has sequences; drain or end it first"
        self.kv.remove_model(name)
        del self.by_name[name]
