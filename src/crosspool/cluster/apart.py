"""ApartCluster: to the engine a few ranks, each of which is a process for every one of its models.

So stand the models of an elastic pool beside each other: nothing orders their work but the device, and yet the engine
counts the memory that they share as that of one rank. Translation of names only; a `RankCluster` does the work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crosspool.cluster.base import (
    Cluster,
    Event,
    ModelBack,
    ModelFailed,
    ModelPlacement,
    RankFailed,
    RankLost,
    RankReady,
    StepFailed,
)
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import StepDescriptor

_SEPARATOR = "."


def own_rank(rank: str, slot: int) -> str:
    """The rank that a model's process is at `rank`."""
    return f"{rank}{_SEPARATOR}{slot}"


def told_rank(own: str) -> str:
    """The rank that the engine knows."""
    return own.split(_SEPARATOR, 1)[0]


class ApartCluster:
    """Implements `base.Cluster` over the ranks that `own_rank` names.

    A process that is lost is told as the loss of its rank: all sequences there are prefilled again, also those whose
    process lives on. The engine must not hand out a step behind another model's: these are of different processes.
    """

    def __init__(self, inner: Cluster, num_slots: Mapping[str, int]) -> None:
        """num_slots: by rank, for how many models there are processes."""
        self._inner, self._num_slots = inner, dict(num_slots)
        self._slots: dict[str, int] = {}  # by model
        self._ranks: dict[str, set[str]] = {}  # the same models', as the engine knows them

    def add_model(self, placement: ModelPlacement) -> None:
        """Raises ValueError where no process is left for the model."""
        ranks = set(placement.ranks)
        taken = {self._slots[name] for name, others in self._ranks.items() if others & ranks}
        room = min(self._num_slots.get(rank, 0) for rank in ranks)
        slot = next((slot for slot in range(room) if slot not in taken), None)
        if slot is None:
            raise ValueError(
                f"no process is left for {placement.name} on {', '.join(placement.ranks)}; "
                "name it when the server starts, or serve from two pools"
            )
        self._inner.add_model(
            replace(
                placement,
                kv_rank=own_rank(placement.kv_rank, slot),
                kv_peers=tuple(own_rank(rank, slot) for rank in placement.kv_peers),
                weights_ranks=tuple(own_rank(rank, slot) for rank in placement.weights_ranks),
            )
        )
        self._slots[placement.name], self._ranks[placement.name] = slot, ranks

    def remove_model(self, name: str) -> None:
        self._inner.remove_model(name)
        self._forget_model(name)

    def load_first(self, models: Sequence[str]) -> None:
        self._inner.load_first(models)

    def submit(self, step: StepDescriptor) -> None:
        header = step.header
        own = own_rank(header.kv_rank, self._slots[header.model])
        self._inner.submit(replace(step, header=header._replace(kv_rank=own)))

    def forget(self, kv_rank: str, sequence_ids: Sequence[int]) -> None:
        for slot in range(self._num_slots[kv_rank]):
            self._inner.forget(own_rank(kv_rank, slot), sequence_ids)

    def map_ahead(self, kv_rank: str, hints: Sequence[Hint]) -> None:
        for slot in range(self._num_slots[kv_rank]):
            self._inner.map_ahead(own_rank(kv_rank, slot), hints)

    def copy_frames(self, kv_rank: str, copies: Sequence[FrameCopy]) -> None:
        raise AssertionError("processes that share memory without pools have no host memory of their own for it")

    def backing_counts(self) -> dict[str, BackingCounts]:
        return self._inner.backing_counts()

    def poll(self, timeout_s: float) -> list[Event]:
        return [self._told(event) for event in self._inner.poll(timeout_s)]

    def wake(self) -> None:
        self._inner.wake()

    def memory_bytes(self) -> dict[str, dict[str, int]]:
        """By process: each says what it holds, so memory that they share appears once for each."""
        return self._inner.memory_bytes()

    def close(self) -> None:
        self._inner.close()

    def _told(self, event: Event) -> Event:
        match event:
            case ModelFailed(name=name):
                self._forget_model(name)
                return event
            case RankLost(rank=rank) | ModelBack(rank=rank) | RankReady(rank=rank) | RankFailed(rank=rank):
                return replace(event, rank=told_rank(rank))
            case StepFailed(waiting_on=ranks):
                return replace(event, waiting_on=tuple(map(told_rank, ranks)))
            case _:
                return event

    def _forget_model(self, name: str) -> None:
        self._slots.pop(name, None)
        self._ranks.pop(name, None)
