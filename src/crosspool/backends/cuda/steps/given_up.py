"""Passes of a KV rank that its host gave up and its device may still run.

Their kernels write to pages that the engine has taken back, and may have given to a sequence of another lane. So a step
that brings pages, and a copy that fills frames out of host memory, begin once all such passes have ended: their waits
give up at once, and what is left of them is a few milliseconds at the most.
"""

from crosspool.backends.base import Wait
from crosspool.backends.cuda.channels.link import OPEN_EPOCH
from crosspool.backends.cuda.steps.lane_memory import LaneMemory
from crosspool.scheduler.step import StepDescriptor


class GivenUp:
    """Arrived once all have ended."""

    def __init__(self) -> None:
        self._passes: list[tuple[LaneMemory, int]] = []  # each lane, and the last epoch that it had been given

    def note(self, lane: LaneMemory) -> None:
        """A step of the lane ends early and leaves its passes here."""
        self._passes.append((lane, lane.last_epoch))

    @property
    def have_ended(self) -> bool:
        """Whether the device is through with all of them."""
        if self._passes:
            self._passes = [each for each in self._passes if not (each[0].is_drained or each[0].done_epoch >= each[1])]
        return not self._passes

    def before(self, step: StepDescriptor) -> Wait | None:
        """What the step has to wait for; None, as a rule."""
        if self.have_ended or not any(row.new_pages for row in step.rows):
            return None
        return Wait((self,), OPEN_EPOCH)

    def arrived(self, epoch: int) -> bool:
        return self.have_ended
