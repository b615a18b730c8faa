"""RankSteps: what becomes of one rank's steps: begun, kept behind another, run segment by segment, told, given up."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from crosspool.cluster.lane_run import LaneRun
from crosspool.cluster.rank_halves import RankHalves, Work, header_of
from crosspool.cluster.step_reports import StepReports
from crosspool.scheduler.step import StepHeader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Behind:
    """What runs after a lane's run. run: its half, where the first segment has run ahead already."""

    work: Work
    run: LaneRun | None = None


class RankSteps:
    """The steps of every lane. is_ffn: this rank's segments count on the links' work clocks.

    runs: by lane, what it is at. Segments are run by whoever knows which lane's turn it is (`rank_loop.py`).
    """

    def __init__(
        self, name: str, halves: RankHalves, reports: StepReports, clock: Callable[[], float], *, is_ffn: bool
    ) -> None:
        self.name, self._halves, self._reports = name, halves, reports
        self._clock, self._is_ffn = clock, is_ffn
        self.runs: dict[int, LaneRun] = {}
        self._behind: dict[int, Behind] = {}  # by lane: what runs after its run
        self._newest_seq: dict[int, int] = {}
        self._finished_seq: dict[int, int] = {}

    def take(self, work: Work, behind: int) -> None:
        """Begin a step, or keep it until the one that it comes behind has ended here."""
        header = header_of(work)
        if header.step_seq <= self._newest_seq.get(header.lane, 0):
            self._reports.stale(header)
            return
        self._newest_seq[header.lane] = header.step_seq
        self._leave_older(header.lane, behind)
        if header.lane in self.runs:
            self._behind[header.lane] = Behind(work)
            self._begin_ahead(header.lane)
        elif behind and self._halves.leads(header) and self._finished_seq.get(header.lane) != behind:
            self._reports.refused(header, behind)
        else:
            self._begin(work)

    def _leave_older(self, lane: int, step_seq: int) -> None:
        """A newer step has come: those before `step_seq` are over for the rank that leads them.

        It does not wait for a share that has no part in a step. Such a rank may be late, and then begins one step after
        another, since each tells it of sequences and pages. One that its device has ended, which nobody has looked for
        yet, ends as ever.
        """
        while (run := self.runs.get(lane)) is not None and run.header.step_seq != step_seq:
            now_s = self._clock()
            if run.rests and run.becomes_ready(now_s):
                self.run_segment(run, now_s)
            if self.runs.get(lane) is run:
                self._drop(lane)
                self._begin_behind(lane)

    def _begin(self, work: Work) -> None:
        run = self._make(work)
        if run is not None:
            self.runs[run.header.lane] = run

    def _make(self, work: Work) -> LaneRun | None:
        """The half of a step; None where it is over here already: it failed, or nobody waits for it."""
        header = header_of(work)
        try:
            run = self._halves.make(work)
        except Exception as failure:  # as in run_segment: it ends this step only
            self._reports.failed(header, failure)
            return None
        if run is None:  # whatever comes next
            self._finished_seq[header.lane] = header.step_seq
        return run

    def _begin_ahead(self, lane: int) -> None:
        """Where devices go on by themselves: run the first segment of the step behind while the one before it runs."""
        behind = self._behind.get(lane)
        if behind is None or behind.run is not None or not self._halves.may_begin_ahead(behind.work):
            return
        del self._behind[lane]
        run = self._make(behind.work)
        if run is None:
            return
        try:
            run.advance()
        except Exception as failure:  # as in run_segment
            self._reports.failed(run.header, failure)
            return
        self._behind[lane] = Behind(behind.work, run)

    def _begin_behind(self, lane: int) -> None:
        behind = self._behind.pop(lane, None)
        if behind is None:
            return
        if behind.run is None:
            self._begin(behind.work)
            return
        behind.run.waits_since(self._clock())
        self.runs[lane] = behind.run

    def run_segment(self, run: LaneRun, now_s: float) -> None:
        """Run a ready lane's next segment, and what its end asks for."""
        lane = run.header.lane
        try:
            run.advance()
        except StopIteration as end:
            del self.runs[lane]
            self._finished_seq[lane] = run.header.step_seq
            self._computed(run, self._clock() - now_s)
            if run.leads:
                self._reports.finished(run, end.value, now_s)
            self._begin_behind(lane)
            return
        except Exception as failure:  # a bug or bad input ends this step; other lanes and the loop go on
            del self.runs[lane]
            self._reports.failed(run.header, failure)
            self._drop_behind(run.header)
            return
        if run.leads and run.is_to_tell(now_s):
            self._reports.told(run, now_s)
        ended_s = self._clock()
        self._computed(run, ended_s - now_s)
        run.waits_since(ended_s)
        if lane in self._behind:
            self._begin_ahead(lane)

    def _computed(self, run: LaneRun, seconds: float) -> None:
        run.compute_s += seconds
        if run.clocks and run.has_waited and self._is_ffn:  # before its first wait it only gets ready
            for clock in run.clocks:
                clock.add(seconds)

    def _drop_behind(self, given_up: StepHeader) -> None:
        """The step behind one that is given up here does not run; the leading rank refuses it.

        Had the leading rank finished the one before, every rank with a part in that had finished it too, and a share
        without one was through with it at once.
        """
        work = self._pop_behind(given_up.lane)
        if work is not None and self._halves.leads(header_of(work)):
            self._reports.refused(header_of(work), given_up.step_seq)

    def expire(self, run: LaneRun) -> None:
        """End a step whose wait is out of time."""
        header, waiting_on = run.header, run.missing()
        self._drop(header.lane)
        self._reports.expired(header, waiting_on, run.deadline_s)
        self._drop_behind(header)

    def abort(self, lane: int, step_seq: int) -> None:
        """Give up this step, if the lane still has it."""
        run, behind = self.runs.get(lane), self._behind.get(lane)
        if run is not None and run.header.step_seq == step_seq:
            header = run.header
            self._drop(lane)
        elif behind is not None and header_of(behind.work).step_seq == step_seq:
            header = header_of(behind.work)
            self._pop_behind(lane)
        else:
            return
        if self._halves.leads(header):
            self._reports.ended(lane, step_seq)
        if run is not None and header is run.header:
            self._drop_behind(header)

    def _drop(self, lane: int) -> None:
        run = self.runs.pop(lane, None)
        if run is not None:
            self._give_up(run)

    def _pop_behind(self, lane: int) -> Work | None:
        """Take the step behind the lane's run out, and give up what of it has begun."""
        behind = self._behind.pop(lane, None)
        if behind is None:
            return None
        if behind.run is not None:
            self._give_up(behind.run)
        return behind.work

    def _give_up(self, run: LaneRun) -> None:
        try:
            run.close()
        except Exception as failure:  # raised by the worker while it let go of a step that is given up anyway
            logger.error("%s: closing step %d failed", self.name, run.header.step_seq, exc_info=failure)

    def give_up_all(self) -> None:
        """Let go of every step."""
        for lane in tuple(self._behind):
            self._pop_behind(lane)
        for lane in tuple(self.runs):
            self._drop(lane)

    def abort_model(self, model: str) -> None:
        """Give up the steps of a model."""
        headers = [run.header for run in self.runs.values()]
        headers += [header_of(behind.work) for behind in self._behind.values()]
        for header in headers:
            if header.model == model:
                self.abort(header.lane, header.step_seq)
