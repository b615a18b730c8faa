"""A cluster without workers, threads or clock: it checks every step it gets and answers from a random generator.

Tokens are a pure function of (seed, position), so that a replayed or a second time prefilled sequence must give the
very same ones. Every rule of the contract between engine and workers is asserted where it could be broken.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence

from crosspool.cluster.base import Event, ModelBack, RankLost, RankReady, StepDone, StepFailed, StepTokens
from crosspool.engine.served_model import ServedModel
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import StepDescriptor
from tests.support.known_sequences import Known, KnownSequences
from tests.support.scripted_tokens import is_end


class SimulatedCluster:
    """Time is an argument; `due(now)` gives the events up to `now`, in order.

    kv_ranks: those whose frames are numbered one after another, where there are several.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        num_frames: int,
        seed: int,
        fail_rate: float = 0.0,
        kv_ranks: Sequence[str] = (),
    ) -> None:
        self.models = {model.name: model for model in models}
        self.fail_rate = fail_rate
        self.rng = random.Random(seed)
        self.down: dict[str, set[str]] = {}  # ranks that are away, with the models that they hold again
        self.running: dict[int, StepDescriptor] = {}
        self.told: dict[int, int] = {}  # by lane: steps of the running one's run that have been told
        self.behind: dict[int, StepDescriptor] = {}  # handed out behind the running one of the lane
        self.dead: set[int] = set()  # lanes whose step's KV rank was lost: its end is still to be told
        self.dead_behind: set[int] = set()  # the same of the step behind, where that alone needs the rank
        self.last_seq: dict[int, int] = {}
        self.steps: list[StepDescriptor] = []
        self.poison: dict[int, str] = {}  # sequences whose rows make the worker raise, by phase
        self.durations: dict[str, float] = {}  # by model; random where a model has none
        self._events: list[tuple[float, int, Event]] = []
        self._count = 0
        self.num_copies = 0
        self.sequences = KnownSequences(self.models, num_frames, kv_ranks)

    @property
    def known(self) -> dict[str, dict[int, Known]]:
        """The sequences of each KV rank."""
        return self.sequences.known

    def check_frames(self, kv_rank: str) -> None:
        self.sequences.check_frames(kv_rank)

    def submit(self, step: StepDescriptor, now: float) -> None:
        header = step.header
        assert header.step_seq > self.last_seq.get(header.lane, 0), "a step number was used again"
        self.last_seq[header.lane] = header.step_seq
        running = self.running.get(header.lane)
        num_ahead = 0 if running is None else running.num_steps - self.told.get(header.lane, 0)
        self.sequences.check(step, running, num_ahead, self._alive())
        self.steps.append(step)
        if running is None:
            self.running[header.lane] = step
            self._begin(step, now)
            return
        assert header.lane not in self.behind, f"lane {header.lane} got a third step"
        assert running.header.kv_rank == header.kv_rank, "steps of two KV ranks have no order in one lane"
        assert header.lane not in self.dead, "a step behind one that nobody waits for"
        self.behind[header.lane] = step
        if any(self._is_away(rank, header.model) for rank in self._needs(step)):  # as if it were handed out alone
            self._after(0.0, now, _failed(step, (), "a rank is away"))

    def _needs(self, step: StepDescriptor) -> tuple[str, ...]:
        header = step.header
        return self.models[header.model].placement.step_ranks(header.kv_rank, header.prefill_rank)

    def _is_away(self, rank: str, model: str) -> bool:
        return rank in self.down and model not in self.down[rank]

    def _begin(self, step: StepDescriptor, now: float) -> None:
        """Decide how the step will end, and when."""
        header, needs = step.header, self._needs(step)
        down = tuple(rank for rank in needs if self._is_away(rank, header.model))
        duration_s = self.durations.get(header.model) or self.rng.uniform(0.001, 0.02)
        culprit = next((r.sequence_id for r in step.rows if self.poison.get(r.sequence_id) == header.phase), None)
        if culprit is not None:
            error = f"{header.kv_rank}: ValueError: sequence {culprit} is odd"
            fatal = StepFailed(lane=header.lane, step_seq=header.step_seq, waiting_on=(), error=error, fatal=True)
            self._after(duration_s, now, fatal)
        elif down or self.rng.random() < self.fail_rate:
            ended = 0 if step.num_steps == 1 else self.rng.randrange(step.num_steps)
            ended = min(ended, self._tell(step, duration_s, now, ended))
            self._after((ended + 1) * duration_s, now, _failed(step, down or (needs[-1],), "no flag came"))
        else:
            ended = self._tell(step, duration_s, now, step.num_steps - 1)
            self._after((ended + 1) * duration_s, now, StepDone(result=self.sequences.result(step.part(ended))))

    def _tell(self, step: StepDescriptor, duration_s: float, now: float, most: int) -> int:
        """Up to `most` steps of a run are told one by one, none after all rows drew a stop token; how many."""
        known, ended = self.sequences.known[step.header.kv_rank], set()
        for idx in range(most):
            sampled = self.sequences.result(step.part(idx)).sampled
            rows = zip(step.part(idx).rows, sampled, strict=True)
            ended |= {row.sequence_id for row, token in rows if is_end(known[row.sequence_id].new, row, token.token_id)}
            if len(ended) == len(step.rows):
                return idx
            told = StepTokens(lane=step.header.lane, step_seq=step.header.step_seq, sampled=sampled)
            self._after((idx + 1) * duration_s, now, told)
        return most

    def forget(self, kv_rank: str, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            for step in self._alive():
                assert all(row.sequence_id != sequence_id for row in step.rows), "forgotten under a running step"
            self.sequences.forget(kv_rank, sequence_id)

    def copy_frames(self, kv_rank: str, copies: Sequence[FrameCopy]) -> None:
        """At once, whatever runs. A rank that is away copies nothing."""
        if kv_rank in self.down and not self.down[kv_rank]:
            return
        self.sequences.copy_frames(kv_rank, copies)
        self.num_copies += len(copies)

    def lose(
        self, rank: str, now: float, back_in_s: float | None, models_in_s: Mapping[str, float] | None = None
    ) -> None:
        """A rank dies; steps that need it fail, and it comes back after `back_in_s`. models_in_s: with these before."""
        self.down[rank] = set()
        self._events = [entry for entry in self._events if not _tells_return(entry[2], rank)]
        self.sequences.lose(rank)
        self._after(0.0, now, RankLost(rank=rank, reason="killed"))
        for lane, step in self.running.items():
            if rank in self._needs(step) and rank in self.models[step.header.model].kv_ranks:
                self.dead.add(lane)
            if rank in self._needs(step):
                self._events = [entry for entry in self._events if not _ends(entry[2], lane)]
                delay_s = self.rng.uniform(0.0, 0.01)
                self._after(delay_s, now, _failed(step, (rank,), f"{rank} is silent"))
            elif lane in self.behind and rank in self._needs(self.behind[lane]):
                if rank in self.models[self.behind[lane].header.model].kv_ranks:
                    self.dead_behind.add(lane)
                self._after(self.rng.uniform(0.0, 0.01), now, _failed(self.behind[lane], (rank,), f"{rank} is silent"))
        heapq.heapify(self._events)
        for model, moment_s in (models_in_s or {}).items():
            self._after(moment_s, now, ModelBack(rank=rank, model=model))
        if back_in_s is not None:
            self._after(back_in_s, now, RankReady(rank=rank, seconds=back_in_s))

    def fail_now(self, lane: int) -> None:
        """Take a step out without an event: the test tells of its end itself."""
        del self.running[lane]
        self._events = [entry for entry in self._events if not _ends(entry[2], lane)]
        heapq.heapify(self._events)

    def next_event_s(self) -> float | None:
        return self._events[0][0] if self._events else None

    def due(self, now: float) -> list[Event]:
        events: list[Event] = []
        while self._events and self._events[0][0] <= now:
            event = heapq.heappop(self._events)[2]
            if isinstance(event, RankReady):
                del self.down[event.rank]
            if isinstance(event, ModelBack):
                self.down[event.rank].add(event.model)
            if isinstance(event, StepTokens):
                self.sequences.commit(self.running[event.lane].part(self.told.get(event.lane, 0)))
                self.told[event.lane] = self.told.get(event.lane, 0) + 1
            if isinstance(event, StepDone):
                step = self.running.pop(event.result.lane)
                self.sequences.commit(step.part(self.told.pop(event.result.lane, 0)))
                self._promote(step.header.lane, now)
            if isinstance(event, StepFailed):
                events += self._take_out(event)
                continue
            events.append(event)
        return events

    def _promote(self, lane: int, now: float) -> None:
        """The step behind one that ended well runs now, unless its end has been decided already."""
        step = self.behind.pop(lane, None)
        if step is not None:
            self.running[lane] = step
            if lane in self.dead_behind:
                self.dead_behind.discard(lane)
                self.dead.add(lane)
            if not any(_ends(entry[2], lane) for entry in self._events):
                self._begin(step, now)

    def _take_out(self, event: StepFailed) -> list[Event]:
        """A failed step, and with it the one behind it: that does not run and fails right after."""
        lane = event.lane
        behind = self.behind.pop(lane, None)
        self.dead_behind.discard(lane)
        if behind is not None and behind.header.step_seq == event.step_seq:
            return [event]
        self.running.pop(lane)
        self.told.pop(lane, None)
        self.dead.discard(lane)
        self._events = [entry for entry in self._events if not _ends(entry[2], lane)]
        heapq.heapify(self._events)
        return [event] if behind is None else [event, _failed(behind, (), "the step before it failed")]

    def _alive(self) -> list[StepDescriptor]:
        """Steps in flight whose KV rank has not been lost under them."""
        running = [step for lane, step in self.running.items() if lane not in self.dead]
        behind = [step for lane, step in self.behind.items() if lane not in self.dead | self.dead_behind]
        return running + behind

    def _after(self, delay_s: float, now: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (now + delay_s, self._count, event))


def _failed(step: StepDescriptor, waiting_on: tuple[str, ...], error: str) -> StepFailed:
    header = step.header
    return StepFailed(lane=header.lane, step_seq=header.step_seq, waiting_on=waiting_on, error=error)


def _tells_return(event: Event, rank: str) -> bool:
    return isinstance(event, ModelBack | RankReady) and event.rank == rank


def _ends(event: Event, lane: int) -> bool:
    """Whether the event is of the lane's running step."""
    return (isinstance(event, StepDone) and event.result.lane == lane) or (
        isinstance(event, StepFailed | StepTokens) and event.lane == lane
    )
