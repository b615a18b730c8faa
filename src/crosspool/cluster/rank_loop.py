"""RankLoop: what one rank does, one segment at a time. Threads, processes and seeded tests all drive this class.

It holds any number of lanes, each with a half step (a generator of the worker), and turns control messages and flags
into progress. It never blocks: `host_loop.py` decides what to do when nothing is ready.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crosspool.backends.base import HalfStep, Inlet, LaneLinks, Outlet
from crosspool.cluster import messages
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.channel import ChannelInlet, ChannelOutlet, a2f_part, f2a_part
from crosspool.cluster.lane_run import LaneRun, Outcome
from crosspool.cluster.loading import Loader, Start, one_line
from crosspool.cluster.messages import FromRank, StepEnded, StepFinished, StepTold, ToRank
from crosspool.cluster.work_clock import WorkClock
from crosspool.cluster.worker import MapsPages, RankWorker
from crosspool.core import SampledToken
from crosspool.kv_pool.backing.base import BackingCounts
from crosspool.scheduler.order import OrderPolicy
from crosspool.scheduler.step import StepDescriptor, StepHeader, StepResult

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
        self._loader = Loader(worker.loads, around.start, around.wake)
        self._loaded: set[str] = set()
        self._runs: dict[int, LaneRun] = {}
        self._behind: dict[int, StepDescriptor | StepHeader] = {}  # by lane: what runs after its run
        self._newest_seq: dict[int, int] = {}
        self._finished_seq: dict[int, int] = {}
        self._outlets: dict[tuple[int, str], Outlet] = {}
        self._inlets: dict[tuple[int, str], Inlet] = {}
        self._clocks: dict[tuple[int, str], WorkClock] = {}  # none where channels lie on devices
        self._placements: dict[str, ModelPlacement] = {}
        self._next_ticket = 0
        self._told_counts: BackingCounts | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight here or a model is loading."""
        return bool(self._runs) or self._loader.is_busy

    def has_work(self) -> bool:
        """Whether `advance` would find something to do."""
        return any(look() for look in self.looks())

    def looks(self) -> list[Callable[[], bool]]:
        """Functions of which one gives True when `advance` would find something to do; until then they stay as good."""
        return [self._loader.has_outcomes, *(run.is_ready for run in self._runs.values())]

    def nap_s(self) -> float:
        """How long a host may look away from this rank: 0 unless all it waits for goes on by itself."""
        if self._loader.is_busy:
            return 0.0
        now_s = self._around.clock()
        return min((run.nap_s(now_s) for run in self._runs.values()), default=NO_NAP_NEEDED_S)

    def advance(self) -> bool:
        """Run one segment, the one the order policy picks, and end steps out of time. False if nothing was ready."""
        if self._loader.has_outcomes():
            self._tell_loads()
        if not self._runs:
            return False
        now_s = self._around.clock()
        if len(self._runs) == 1:
            (run,) = self._runs.values()
            if run.becomes_ready(now_s):
                self._run_segment(run, now_s)
                return True
            if (deadline_s := run.deadline_s) is None or now_s <= deadline_s:
                return False
        ready = []
        for run in tuple(self._runs.values()):
            segment = run.segment(now_s, self._next_ticket, self._patience_s)
            if segment is not None:
                ready.append(segment)
                self._next_ticket = max(self._next_ticket, segment.ticket + 1)
            elif (deadline_s := run.deadline_s) is not None and now_s > deadline_s:
                self._expire(run)
        if not ready:
            return False
        self._run_segment(self._runs[self._around.order(ready).lane], now_s)
        return True

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
                if self._worker.mapping is not None:
                    self._worker.mapping.hint(hints)
                    self._report_mapping(self._worker.mapping)
            case messages.CopyFrames(copies):
                self._worker.host_frames.copy(copies)
            case messages.OpenChannels():
                self._open(message)
            case messages.CloseChannels(peer):
                for ends in (self._outlets, self._inlets, self._clocks):
                    for key in [key for key in ends if key[1] == peer]:
                        del ends[key]
                if self._worker.links is not None:
                    self._worker.links.close_links(peer)
            case messages.AddModel(placement):
                self._placements[placement.name] = placement
                self._loader.add(message)
            case messages.RemoveModel(model):
                self._remove(model)
            case messages.Stop():
                self.close()

    def hello(self) -> None:
        """Tell that the rank takes work, and what it holds."""
        self._report_memory()
        self._around.emit(messages.Hello())

    def close(self) -> None:
        """Give up every step and load."""
        self._loader.cancel_all()
        self._behind.clear()
        for lane in tuple(self._runs):
            self._drop(lane)

    def _take(self, work: StepDescriptor | StepHeader, behind: int) -> None:
        """Begin a step, or keep it until the one that it comes behind has ended here."""
        header = _header(work)
        if header.step_seq <= self._newest_seq.get(header.lane, 0):
            error = f"{self.name}: step {header.step_seq} of lane {header.lane} is not newer than its last step"
            self._around.emit(StepEnded(header.lane, header.step_seq, error=error, fatal=True))
            return
        self._newest_seq[header.lane] = header.step_seq
        self._leave_older(header.lane, behind)
        if header.lane in self._runs:
            self._behind[header.lane] = work
        elif behind and self._leads(header) and self._finished_seq.get(header.lane) != behind:
            self._refuse(header, behind)
        else:
            self._begin(work)

    def _leave_older(self, lane: int, step_seq: int) -> None:
        """A newer step has come: those before `step_seq` are over for the rank that leads them.

        It does not wait for a share that has no part in a step. Such a rank may be late, and then begins one step after
        another, since each tells it of sequences and pages.
        """
        while (run := self._runs.get(lane)) is not None and run.header.step_seq != step_seq:
            self._drop(lane)
            self._begin_behind(lane)

    def _begin_behind(self, lane: int) -> None:
        if lane in self._behind:
            self._begin(self._behind.pop(lane))

    def _begin(self, work: StepDescriptor | StepHeader) -> None:
        header = _header(work)
        half: HalfStep[Outcome]
        try:
            if not isinstance(work, StepDescriptor):
                links = self._links(header, (header.kv_rank,))
                half = self._worker.ffn.run(work, links)
            elif self._worker.prefill_worker is not None:
                links = self._links(header, (header.kv_rank,))
                half = self._worker.prefill_worker.run(work, links)
            elif self._leads(header):
                links = self._links(header, *self._peers(header))
                half = self._worker.attention.run(work, links)
            else:
                links = self._links(header, (), (header.kv_rank,))
                share = self._worker.share.run_share(work, links)
                if share is None:  # nobody waits for it: the step is over here, whatever comes next
                    self._finished_seq[header.lane] = header.step_seq
                    return
                half = share
        except Exception as failure:  # as in _run_segment: it ends this step only
            self._fail(header, failure)
            return
        run = LaneRun(header, half, links, self._around.clock(), self._deadline_s(header))
        run.clocks = tuple(found for peer in links.outlets if (found := self._clocks.get((header.lane, peer))))
        self._runs[header.lane] = run

    def _peers(self, header: StepHeader) -> tuple[Sequence[str], Sequence[str]]:
        """Those whose rows the leading rank waits for in every layer, and those of its exchange."""
        placement = self._placements.get(header.model)
        if placement is None:
            return (), ()
        if header.prefill_rank is not None:
            return (header.prefill_rank,), ()
        return placement.weights_ranks, placement.shares(self.name)

    def _leads(self, header: StepHeader) -> bool:
        """Whether this rank's word ends the step."""
        return self._worker.is_kv and header.kv_rank == self.name

    def _deadline_s(self, header: StepHeader) -> float:
        return self._around.step_deadline_s * (1 if self._leads(header) else 2)

    def _links(self, header: StepHeader, peers: Sequence[str], exchange: Sequence[str] = ()) -> LaneLinks:
        missing = [peer for peer in (*peers, *exchange) if (header.lane, peer) not in self._outlets]
        if missing or not (peers or exchange):
            raise ValueError(
                f"lane {header.lane} has no channels for {header.model} to {', '.join(missing) or 'any rank'}"
            )
        return LaneLinks(
            outlets={peer: self._outlets[header.lane, peer] for peer in peers},
            inlets={peer: self._inlets[header.lane, peer] for peer in peers},
            exchange_outlets={peer: self._outlets[header.lane, peer] for peer in exchange},
            exchange_inlets={peer: self._inlets[header.lane, peer] for peer in exchange},
        )

    def _run_segment(self, run: LaneRun, now_s: float) -> None:
        lane = run.header.lane
        try:
            run.advance()
        except StopIteration as end:
            del self._runs[lane]
            self._finished_seq[lane] = run.header.step_seq
            self._computed(run, self._around.clock() - now_s)
            if self._leads(run.header):
                self._around.emit(StepFinished(_result(run, end.value), run.take_untold(now_s)))
            self._begin_behind(lane)
            return
        except Exception as failure:  # a bug or bad input ends this step; other lanes and the loop go on
            del self._runs[lane]
            self._fail(run.header, failure)
            return
        if run.is_to_tell(now_s) and self._leads(run.header):
            self._around.emit(StepTold(lane, run.header.step_seq, run.take_untold(now_s)))
        ended_s = self._around.clock()
        self._computed(run, ended_s - now_s)
        run.waits_since(ended_s)

    def _computed(self, run: LaneRun, seconds: float) -> None:
        run.compute_s += seconds
        if run.has_waited and not self._worker.is_kv:  # before its first wait it only gets ready
            for clock in run.clocks:
                clock.add(seconds)

    def _fail(self, header: StepHeader, failure: Exception) -> None:
        logger.error("%s: step %d of %s failed", self.name, header.step_seq, header.model, exc_info=failure)
        error = f"{self.name}: {one_line(failure)}"
        self._around.emit(StepEnded(header.lane, header.step_seq, error=error, fatal=True))
        self._drop_behind(header)

    def _refuse(self, header: StepHeader, behind: int) -> None:
        """The step behind one that failed ends without having run; the leading rank says so."""
        error = f"{self.name}: step {behind} of lane {header.lane}, behind which it came, failed"
        self._around.emit(StepEnded(header.lane, header.step_seq, error=error))

    def _drop_behind(self, given_up: StepHeader) -> None:
        """The step behind one that is given up here does not run; the leading rank refuses it.

        Had the leading rank finished the one before, every rank with a part in that had finished it too, and a share
        without one was through with it at once.
        """
        work = self._behind.pop(given_up.lane, None)
        if work is not None and self._leads(_header(work)):
            self._refuse(_header(work), given_up.step_seq)

    def _expire(self, run: LaneRun) -> None:
        header = run.header
        waiting_on = run.missing()
        error = (
            f"{self.name}: no answer from {', '.join(waiting_on)} within {self._deadline_s(header):g} s"
            f" in step {header.step_seq} of lane {header.lane} ({header.model})"
        )
        self._drop(header.lane)
        self._around.emit(StepEnded(header.lane, header.step_seq, waiting_on, error))
        self._drop_behind(header)

    def _abort(self, lane: int, step_seq: int) -> None:
        run, work = self._runs.get(lane), self._behind.get(lane)
        if run is not None and run.header.step_seq == step_seq:
            header = run.header
            self._drop(lane)
        elif work is not None and _header(work).step_seq == step_seq:
            header = _header(self._behind.pop(lane))
        else:
            return
        if self._leads(header):
            self._around.emit(StepEnded(lane, step_seq))
        if run is not None and header is run.header:
            self._drop_behind(header)

    def _drop(self, lane: int) -> None:
        run = self._runs.pop(lane, None)
        if run is None:
            return
        try:
            run.close()
        except Exception as failure:  # raised by the worker while it let go of a step that is given up anyway
            logger.error("%s: closing step %d failed", self.name, run.header.step_seq, exc_info=failure)

    def _open(self, message: messages.OpenChannels) -> None:
        memory = message.region.map()
        message.region.close()
        if self._worker.links is not None:
            ring = self._around.ring(message.peer)
            ends = self._worker.links.open_link(
                message.lane, message.peer, memory, message.capacity, ring, message.is_far
            )
            self._outlets[message.lane, message.peer], self._inlets[message.lane, message.peer] = ends
            return
        a2f, f2a = a2f_part(memory, message.capacity), f2a_part(memory, message.capacity)
        key = (message.lane, message.peer)
        out, into = (a2f, f2a) if self._worker.is_kv and not message.is_far else (f2a, a2f)
        self._outlets[key] = ChannelOutlet(out, message.capacity, self._around.ring(message.peer))
        self._inlets[key] = ChannelInlet(into, message.capacity)
        self._clocks[key] = WorkClock(f2a)

    def _remove(self, model: str) -> None:
        headers = [run.header for run in self._runs.values()] + [_header(work) for work in self._behind.values()]
        for header in headers:
            if header.model == model:
                self._abort(header.lane, header.step_seq)
        self._placements.pop(model, None)
        self._loader.cancel(model)
        if model in self._loaded:
            self._loaded.discard(model)
            self._worker.loads.remove_model(model)
            self._report_memory()

    def _tell_loads(self) -> None:
        for outcome in self._loader.outcomes():
            if not isinstance(outcome, messages.Loading):
                self._report_memory()
            if isinstance(outcome, messages.Loaded):
                self._loaded.add(outcome.model)
            self._around.emit(outcome)

    def _report_mapping(self, mapping: MapsPages) -> None:
        counts = mapping.counts()
        if counts != self._told_counts:
            has_other_memory = self._told_counts is None or counts.absent_frames != self._told_counts.absent_frames
            self._told_counts = counts
            if has_other_memory:
                self._report_memory()
            self._around.emit(messages.BackingReport(counts))

    def _report_memory(self) -> None:
        self._around.emit(messages.MemoryReport(dict(self._worker.loads.memory_bytes())))


def _header(work: StepDescriptor | StepHeader) -> StepHeader:
    return work.header if isinstance(work, StepDescriptor) else work


def _result(run: LaneRun, sampled: tuple[SampledToken, ...]) -> StepResult:
    return StepResult(
        lane=run.header.lane,
        step_seq=run.header.step_seq,
        sampled=sampled,
        attention_s=run.compute_s,
        wait_s=run.wait_s,
        ffn_s=run.take_ffn_s(),
    )
