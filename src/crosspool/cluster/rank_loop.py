"""RankLoop: what one rank does, one segment at a time. Threads, processes and seeded tests all drive this class.

It holds any number of lanes, each with a half step (a generator of the worker), and turns control messages and flags
into progress. It never blocks: `host_loop.py` decides what to do when nothing is ready.
"""

from collections.abc import Callable
from dataclasses import dataclass

from crosspool.cluster import messages
from crosspool.cluster.loading import Start
from crosspool.cluster.messages import FromRank, ToRank
from crosspool.cluster.rank_halves import RankHalves
from crosspool.cluster.rank_links import RankLinks
from crosspool.cluster.rank_models import RankModels
from crosspool.cluster.rank_steps import RankSteps
from crosspool.cluster.step_reports import StepReports
from crosspool.cluster.worker import RankWorker
from crosspool.scheduler.order import OrderPolicy, Segment

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
        halves = RankHalves(name, worker, self._models, self._links, around.clock, around.step_deadline_s)
        reports = StepReports(name, around.emit)
        self._steps = RankSteps(name, halves, reports, around.clock, is_ffn=not worker.is_kv)
        self._runs = self._steps.runs
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
        self._steps.run_segment(self._runs[self._around.order(ready).lane], now_s)
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
                self._steps.expire(run)
        return ready

    def _advance_alone(self, now_s: float) -> bool:
        """The same of a lone lane, which needs no order."""
        (run,) = self._runs.values()
        if run.becomes_ready(now_s):
            self._steps.run_segment(run, now_s)
            self._run_on()
            return True
        if run.is_overdue(now_s):
            self._steps.expire(run)
        return False

    def _run_on(self) -> None:
        """Run a lone lane's next segment too where it waits for nobody: a turn of the host is longer than that."""
        while len(self._runs) == 1:
            (run,) = self._runs.values()
            if not run.waits_for_nobody:
                return
            now_s = self._around.clock()
            run.becomes_ready(now_s)
            self._steps.run_segment(run, now_s)

    def handle(self, message: ToRank) -> None:
        """Take one control message. `Stop` is the host's."""
        match message:
            case messages.Step(work, behind):
                self._steps.take(work, behind)
            case messages.AbortStep(lane, step_seq):
                self._steps.abort(lane, step_seq)
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
                self._steps.abort_model(model)
                self._models.remove(model)
            case messages.Stop():
                self.close()

    def hello(self) -> None:
        """Tell that the rank takes work, and what it holds."""
        self._models.report_memory()
        self._around.emit(messages.Hello())

    def close(self) -> None:
        """Give up every step and load."""
        self._models.close()
        self._steps.give_up_all()
