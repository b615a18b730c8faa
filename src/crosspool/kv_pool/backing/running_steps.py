"""RunningSteps: which steps may touch pages now, and whether those that had begun at some moment have all ended."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Running:
    """A step: the epoch in which it began, and whose pages it may touch."""

    epoch: int
    sequence_ids: frozenset[int]


class RunningSteps:
    """Each step begins an epoch of its own. An epoch is over once every step has ended that had begun by then."""

    def __init__(self) -> None:
        self.epoch = 0
        self._active: dict[Hashable, _Running] = {}

    def begin(self, step: Hashable, sequence_ids: Collection[int]) -> None:
        self.epoch += 1
        self._active[step] = _Running(self.epoch, frozenset(sequence_ids))

    def end(self, step: Hashable) -> None:
        self._active.pop(step, None)

    def may_touch(self, sequence_id: int) -> bool:
        """Whether a step runs that may touch this sequence's pages."""
        return any(sequence_id in step.sequence_ids for step in self._active.values())

    def is_over(self, epoch: int) -> bool:
        return all(step.epoch > epoch for step in self._active.values())
