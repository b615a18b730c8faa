"""StepOnDevice: a step that its half has handed to the lane's device, until it has ended there or is given up."""

from types import TracebackType

from crosspool.backends.base import HalfStep, Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH
from crosspool.backends.cuda.steps.lane import WorkerLane


class StepOnDevice:
    """What a half does within has to come to its end: where it raises, or is closed half-way, the device gives the step
    up too.

    follows: the last epoch of the lane's step before, where that has not ended here yet (`is_ahead`); else 0.
    """

    __slots__ = ("_behind", "_lane", "_last_epoch", "follows")

    def __init__(self, lane: WorkerLane, last_epoch: int, *, is_ahead: bool = False) -> None:
        self.follows = self._behind = lane.memory.last_epoch if is_ahead else 0
        self._lane, self._last_epoch = lane, last_epoch

    def __enter__(self) -> "StepOnDevice":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._lane.give_up(self._last_epoch, self._behind)

    def await_turn(self) -> HalfStep[None]:
        """Wait until the step before has ended here, which until then goes on where this one is given up."""
        yield Wait((), OPEN_EPOCH)
        self._behind = 0
