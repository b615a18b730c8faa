"""StepReports: what a rank tells the parent of its steps, and how it says why one ended."""

import logging
from collections.abc import Callable

from crosspool.cluster.lane_run import LaneRun
from crosspool.cluster.loading import one_line
from crosspool.cluster.messages import FromRank, StepEnded, StepFinished, StepTold
from crosspool.core import SampledToken
from crosspool.scheduler.step import StepHeader, StepResult

logger = logging.getLogger(__name__)


class StepReports:
    """Reports of rank `name`. Results and refusals are the leading rank's word; any rank may fail or wait in vain."""

    def __init__(self, name: str, emit: Callable[[FromRank], None]) -> None:
        self._name = name
        self._emit = emit

    def finished(self, run: LaneRun, sampled: tuple[SampledToken, ...], now_s: float) -> None:
        result = StepResult(
            lane=run.header.lane,
            step_seq=run.header.step_seq,
            sampled=sampled,
            attention_s=run.compute_s,
            wait_s=run.wait_s,
            ffn_s=run.take_ffn_s(),
        )
        self._emit(StepFinished(result, run.take_untold(now_s)))

    def told(self, run: LaneRun, now_s: float) -> None:
        """Tokens of a run that goes on."""
        self._emit(StepTold(run.header.lane, run.header.step_seq, run.take_untold(now_s)))

    def ended(self, lane: int, step_seq: int) -> None:
        """It was given up as the parent asked."""
        self._emit(StepEnded(lane, step_seq))

    def stale(self, header: StepHeader) -> None:
        error = f"{self._name}: step {header.step_seq} of lane {header.lane} is not newer than its last step"
        self._emit(StepEnded(header.lane, header.step_seq, error=error, fatal=True))

    def failed(self, header: StepHeader, failure: Exception) -> None:
        logger.error("%s: step %d of %s failed", self._name, header.step_seq, header.model, exc_info=failure)
        error = f"{self._name}: {one_line(failure)}"
        self._emit(StepEnded(header.lane, header.step_seq, error=error, fatal=True))

    def refused(self, header: StepHeader, behind: int) -> None:
        """The step behind one that failed ends without having run."""
        error = f"{self._name}: step {behind} of lane {header.lane}, behind which it came, failed"
        self._emit(StepEnded(header.lane, header.step_seq, error=error))

    def expired(self, header: StepHeader, waiting_on: tuple[str, ...], deadline_s: float) -> None:
        """A wait of it has passed its deadline."""
        late = ", ".join(waiting_on) or "its own device"
        error = (
            f"{self._name}: no answer from {late} within {deadline_s:g} s"
            f" in step {header.step_seq} of lane {header.lane} ({header.model})"
        )
        self._emit(StepEnded(header.lane, header.step_seq, waiting_on, error))
