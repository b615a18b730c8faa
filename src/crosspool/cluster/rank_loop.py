"""RankLoop: what one rank does, one segment at a time. Threads, processes and seeded tests all drive this class.

It holds any number of lanes, each with a half step (a generator of the worker), and turns control messages and flags
into progress. It never blocks: `host_loop.py` decides what to do when nothing is ready.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from crosspool.cluster import messages
from crosspool.cluster.lane_run import LaneRun
from crosspool.cluster.loading import Start
from crosspool.cluster.messages import FromRank, ToRank
from crosspool.cluster.rank_halves import RankHalves, Work, header_of
from crosspool.cluster.rank_links import RankLinks
from crosspool.cluster.rank_models import RankModels
from crosspool.cluster.step_reports import StepReports
from crosspool.cluster.worker import RankWorker
from crosspool.scheduler.order import OrderPolicy, Segment
from crosspool.scheduler.step import StepHeader

logger = logging.getLogger(__name__)

NO_NAP_NEEDED_S = 60.0
"""Said by a rank without steps: it asks for no look at all."""


@dataclass(frozen=True, slots=True)
class RankSurroundings:
    """What a rank's loop needs from where it runs. `ring(peer)` is called after each put to that peer."""

    emit: Callable[[FromRank], None]
    ring: Callable[[str], Callable[[], None]]
    wake: Callable[[], None]  # makes the host of this loop look at it again, from any thread
    clock: Callable[[], float]  # seconds, monotonic
    order: OrderPolicy
    step_deadline_s: float
    start: Start


@dataclass(frozen=True, slots=True)
class Behind:
    """What runs after a lane's run. run: its half, where the first segment has run ahead already."""

    work: Work
    run: LaneRun | None = None


class RankLoop:
    """The loop of one rank. A worker of the KV pool gets descriptors, one of the weights pool headers.

    A wait of the KV rank that leads a step may take `step_deadline_s`, then the step ends and the missing ranks are
    named. The others wait twice as long, so that of two ranks that wait for a third one the leading one speaks first.
    """

    def __init__(self, name: str, worker: RankWorker, around: RankSurroundings) -> None:
        self.name = name
        self._worker = worker
        self._around = around
        self._patience_s = around.step_deadline_s / 4
        self._models = RankModels(worker, around.start, around.wake, around.emit)
        self._links = RankLinks(worker, around.ring)
        self._halves = RankHalves(name, worker, self._models, self._links, around.clock, around.step_deadline_s)
        self._reports = StepReports(name, around.emit)
        self._runs: dict[int, LaneRun] = {}  # by lane: what it is at
        self._behind: dict[int, Behind] = {}  # by lane: what runs after its run
        self._newest_seq: dict[int, int] = {}
        self._finished_seq: dict[int, int] = {}
        self._next_ticket = 0

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight here or a model is loading."""
        return bool(self._runs) or self._models.is_busy

    def has_work(self) -> bool:
        """Whether `advance` would find something to do."""
        return any(look() for look in self.looks())

    def looks(self) -> list[Callable[[], bool]]:
        """Functions of which one gives True when `advance` would find something to do; until then they stay as good."""
        return [self._models.has_outcomes, *(run.is_ready for run in self._runs.values())]

    def nap_s(self) -> float:
        """How long a host may look away from this rank: 0 unless all it waits for goes on by itself."""
        if self._models.is_busy:
            return 0.0
        now_s = self._around.clock()
        return min((run.nap_s(now_s) for run in self._runs.values()), default=NO_NAP_NEEDED_S)

    @property
    def rests(self) -> bool:
        """Whether its only lane waits for what a device does by itself: a look right now would hardly find anything."""
        if len(self._runs) != 1:
            return False
        (run,) = self._runs.values()
        return run.rests

    def advance(self) -> bool:
        """Run one segment, the one the order policy picks, and end steps out of time. False if nothing was ready."""
        if self._models.has_outcomes():
            self._models.tell()
        if not self._runs:
            return False
        now_s = self._around.clock()
        if len(self._runs) == 1:
            return self._advance_alone(now_s)
        ready = self._ready_segments(now_s)
        if not ready:
            return False
        self._run_segment(self._runs[self._around.order(ready).lane], now_s)
        return True

    def _ready_segments(self, now_s: float) -> list[Segment]:
        """Of every lane whose next one is ready; a step whose wait is out of time is ended."""
        ready = []
        for run in tuple(self._runs.values()):
            segment = run.segment(now_s, self._next_ticket, self._patience_s)
            if segment is not None:
                ready.append(segment)
                self._next_ticket = max(self._next_ticket, segment.ticket + 1)
            elif run.is_overdue(now_s):
                self._expire(run)
        return ready

    def _advance_alone(self, now_s: float) -> bool:
        """The same of a lone lane, which needs no order."""
        (run,) = self._runs.values()
        if run.becomes_ready(now_s):
            self._run_segment(run, now_s)
            self._run_on()
            return True
        if run.is_overdue(now_s):
            self._expire(run)
        return False

    def _run_on(self) -> None:
        """Run a lone lane's next segment too where it waits for nobody: a turn of the host is longer than that."""
        while len(self._runs) == 1:
            (run,) = self._runs.values()
            if not run.waits_for_nobody:
                return
            now_s = self._around.clock()
            run.becomes_ready(now_s)
            self._run_segment(run, now_s)

    def handle(self, message: ToRank) -> None:
        """Take one control message. `Stop` is the host's."""
        match message:
            case messages.Step(work, behind):
                self._take(work, behind)
            case messages.AbortStep(lane, step_seq):
                self._abort(lane, step_seq)
            case messages.Forget(sequence_ids):
                self._worker.attention.forget(sequence_ids)
            case messages.MapAhead(hints):
                self._models.map_ahead(hints)
            case messages.CopyFrames(copies):
                self._worker.host_frames.copy(copies)
            case messages.OpenChannels():
                self._links.open(message)
            case messages.CloseChannels(peer):
                self._links.close(peer)
            case messages.AddModel():
                self._models.add(message)
            case messages.RemoveModel(model):
                self._remove(model)
            case messages.Stop():
                self.close()

    def hello(self) -> None:
        """Tell that the rank takes work, and what it holds."""
        self._models.report_memory()
        self._around.emit(messages.Hello())

    def close(self) -> None:
        """Give up every step and load."""
        self._models.close()
        for lane in tuple(self._behind):
            self._pop_behind(lane)
        for lane in tuple(self._runs):
            self._drop(lane)

    def _take(self, work: Work, behind: int) -> None:
        """Begin a step, or keep it until the one that it comes behind has ended here."""
        header = header_of(work)
        if header.step_seq <= self._newest_seq.get(header.lane, 0):
            self._reports.stale(header)
            return
        self._newest_seq[header.lane] = header.step_seq
        self._leave_older(header.lane, behind)
        if header.lane in self._runs:
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
        while (run := self._runs.get(lane)) is not None and run.header.step_seq != step_seq:
            now_s = self._around.clock()
            if run.rests and run.becomes_ready(now_s):
                self._run_segment(run, now_s)
            if self._runs.get(lane) is run:
                self._drop(lane)
                self._begin_behind(lane)

    def _begin(self, work: Work) -> None:
        run = self._make(work)
        if run is not None:
            self._runs[run.header.lane] = run

    def _make(self, work: Work) -> LaneRun | None:
        """The half of a step; None where it is over here already: it failed, or nobody waits for it."""
        header = header_of(work)
        try:
            run = self._halves.make(work)
        except Exception as failure:  # as in _run_segment: it ends this step only
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
        except Exception as failure:  # as in _run_segment
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
        behind.run.waits_since(self._around.clock())
        self._runs[lane] = behind.run

    def _run_segment(self, run: LaneRun, now_s: float) -> None:
        lane = run.header.lane
        try:
            run.advance()
        except StopIteration as end:
            del self._runs[lane]
            self._finished_seq[lane] = run.header.step_seq
            self._computed(run, self._around.clock() - now_s)
            if self._halves.leads(run.header):
                self._reports.finished(run, end.value, now_s)
            self._begin_behind(lane)
            return
        except Exception as failure:  # a bug or bad input ends this step; other lanes and the loop go on
            del self._runs[lane]
            self._reports.failed(run.header, failure)
            self._drop_behind(run.header)
            return
        if run.is_to_tell(now_s) and self._halves.leads(run.header):
            self._reports.told(run, now_s)
        ended_s = self._around.clock()
        self._computed(run, ended_s - now_s)
        run.waits_since(ended_s)
        self._begin_ahead(lane)

    def _computed(self, run: LaneRun, seconds: float) -> None:
        run.compute_s += seconds
        if run.has_waited and not self._worker.is_kv:  # before its first wait it only gets ready
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

    def _expire(self, run: LaneRun) -> None:
        header, waiting_on = run.header, run.missing()
        self._drop(header.lane)
        self._reports.expired(header, waiting_on, self._halves.deadline_s(header))
        self._drop_behind(header)

    def _abort(self, lane: int, step_seq: int) -> None:
        run, behind = self._runs.get(lane), self._behind.get(lane)
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
        run = self._runs.pop(lane, None)
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

    def _remove(self, model: str) -> None:
        headers = [run.header for run in self._runs.values()]
        headers += [header_of(behind.work) for behind in self._behind.values()]
        for header in headers:
            if header.model == model:
                self._abort(header.lane, header.step_seq)
        self._models.remove(model)
