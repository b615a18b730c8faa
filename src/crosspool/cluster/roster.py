"""Roster: the models of a cluster, and how far each is on every rank of its placement. Pure: time is an argument."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crosspool.cluster.base import ModelPlacement, ModelReady
from crosspool.cluster.messages import AddModel

MAX_LOAD_LOSSES = 2
"""Times a rank may be lost while it first loads a model; then the model is blamed, and dropped."""


@dataclass(slots=True)
class _Entry:
    placement: ModelPlacement
    since_s: float
    pending: dict[str, int] = field(default_factory=dict)  # rank -> load_id, or -1 until its load is asked for
    has_bytes: set[str] = field(default_factory=set)  # of pending ranks: those that have all to read
    bytes_by_rank: dict[str, int] = field(default_factory=dict)
    num_losses: int = 0
    is_announced: bool = False

    @property
    def ranks(self) -> tuple[str, ...]:
        return self.placement.ranks


class Roster:
    """Placed models by name."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._next_load_id = 1

    def add(self, placement: ModelPlacement, now_s: float) -> None:
        """Place a model; its loads begin with `load`. Raises ValueError if the name is taken."""
        if placement.name in self._entries:
            raise ValueError(f"model {placement.name} is already placed; remove it first")
        entry = _Entry(placement, now_s)
        entry.pending = dict.fromkeys(entry.ranks, -1)
        self._entries[placement.name] = entry

    def remove(self, name: str) -> None:
        """Take a model out. Raises ValueError if there is none of the name."""
        self.placement(name)
        del self._entries[name]

    def load(self, name: str, rank: str) -> AddModel:
        """The message that makes `rank` load its share."""
        entry = self._entries[name]
        entry.pending[rank] = self._next_load_id
        entry.has_bytes.discard(rank)
        self._next_load_id += 1
        return AddModel(entry.placement, entry.pending[rank])

    def next_load(self, rank: str, first: Sequence[str]) -> AddModel | None:
        """The next load of a rank that comes up, which reads one model at a time; None while one is read, or after all.

        first: models that go before others, in this order.
        """
        here = {name: entry for name, entry in self._entries.items() if rank in entry.pending}
        if any(entry.pending[rank] >= 0 and rank not in entry.has_bytes for entry in here.values()):
            return None
        waiting = [name for name, entry in here.items() if entry.pending[rank] < 0]
        if not waiting:
            return None
        turns = {name: turn for turn, name in enumerate(first)}
        return self.load(min(waiting, key=lambda name: turns.get(name, len(turns))), rank)

    def has_read(self, name: str, rank: str) -> None:
        """All bytes of the load that is under way are there; what is left of it needs no file."""
        self._entries[name].has_bytes.add(rank)

    def is_current(self, name: str, rank: str, load_id: int) -> bool:
        """Whether a rank's report is about the load that we wait for."""
        return name in self._entries and self._entries[name].pending.get(rank) == load_id

    def has_loaded(self, name: str, rank: str, num_bytes: int, now_s: float) -> ModelReady | None:
        """A rank holds its share; gives the event if it was the last one and the model is new."""
        entry = self._entries[name]
        del entry.pending[rank]
        entry.bytes_by_rank[rank] = num_bytes
        if entry.pending or entry.is_announced:
            return None
        entry.is_announced = True
        return ModelReady(name=name, seconds=now_s - entry.since_s, bytes_by_rank=dict(entry.bytes_by_rank))

    def rank_lost(self, rank: str) -> list[str]:
        """Everything on the rank is to be loaded again; gives the new models that are to blame for too many losses."""
        blamed = []
        for name, entry in self._entries.items():
            if rank not in entry.ranks:
                continue
            was_loading = entry.pending.get(rank, -1) >= 0
            entry.pending[rank] = -1
            if was_loading and not entry.is_announced:
                entry.num_losses += 1
                if entry.num_losses >= MAX_LOAD_LOSSES:
                    blamed.append(name)
        return blamed

    def ranks(self, name: str) -> tuple[str, ...]:
        """Every rank that holds a part of the model, as in its placement. Raises ValueError as `placement`."""
        return self.placement(name).ranks

    def placements(self) -> list[ModelPlacement]:
        return [entry.placement for entry in self._entries.values()]

    def on_rank(self, rank: str) -> list[str]:
        """Names of the models placed on it."""
        return [name for name, entry in self._entries.items() if rank in entry.ranks]

    def is_loading(self, rank: str) -> bool:
        """Whether the rank still has to load any model."""
        return any(rank in entry.pending for entry in self._entries.values())

    def holds(self, rank: str, name: str) -> bool:
        """Whether the rank, which is one of the model's, has loaded it."""
        return rank not in self._entries[name].pending

    def is_announced(self, name: str) -> bool:
        return name in self._entries and self._entries[name].is_announced

    def new_models(self, rank: str) -> list[str]:
        """Models placed on the rank that were never ready."""
        return [name for name in self.on_rank(rank) if not self._entries[name].is_announced]

    def placement(self, name: str) -> ModelPlacement:
        """Raises ValueError if there is none of the name."""
        if name not in self._entries:
            raise ValueError(f"no model {name!r} is placed; there are: {', '.join(self._entries) or 'none'}")
        return self._entries[name].placement
