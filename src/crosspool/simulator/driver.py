"""CoreDriver: the engine's core as a simulation sees it: requests in, steps out, tokens recorded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from crosspool.cluster.base import StepDone
from crosspool.core import Request, SampledToken, SamplingParams
from crosspool.engine.lanes import Lane
from crosspool.engine.repeat import num_repeats, repeat_step
from crosspool.engine.sequence import SequenceUpdate
from crosspool.errors import CapacityError, ContextLengthError, CrossPoolError, QueueFullError
from crosspool.scheduler.step import StepDescriptor, StepResult
from crosspool.simulator.group import SimulatedGroup
from crosspool.simulator.measures import ModelMeasures, TimeAverage

TOKEN, END_TOKEN = 0, 1
"""What the simulated models say, and their end token."""

OCCUPANCY_STEPS = 2000


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request of a workload. max_tokens: what the client asks for, at least what it gets."""

    arrival_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int


@dataclass(slots=True)
class _Live:
    """A sequence that has not ended, and when its tokens came."""

    request: SimulatedRequest
    measures: ModelMeasures
    admitted_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    num_tokens: int = 0


class Arrivals:
    """Requests by arrival, one looked at ahead."""

    def __init__(self, requests: Iterable[SimulatedRequest]) -> None:
        self._left = iter(requests)
        self._coming = next(self._left, None)

    @property
    def next_s(self) -> float:
        """When the next one comes; infinity after the last."""
        return float("inf") if self._coming is None else self._coming.arrival_s

    def take(self, now: float) -> Iterator[SimulatedRequest]:
        """Those that have arrived."""
        while self._coming is not None and self._coming.arrival_s <= now:
            coming, self._coming = self._coming, next(self._left, None)
            yield coming


class CoreDriver:
    """Feeds one core and records what comes out. Every method takes the virtual time; nothing here has a clock."""

    def __init__(self, group: SimulatedGroup) -> None:
        self.core = group.make_core()
        self.measures = {model.name: ModelMeasures() for model in group.models}
        self.occupancy = {  # frames held, by KV rank
            name: TimeAverage(max(1.0, pages.pool.budget / OCCUPANCY_STEPS))
            for name, pages in self.core.kv.by_rank.items()
        }
        self._pages = [(pages, self.occupancy[name]) for name, pages in self.core.kv.by_rank.items()]
        self._live: dict[int, _Live] = {}
        self._prompts: dict[int, list[int]] = {}
        self._sampling: dict[int, SamplingParams] = {}
        self._occupied_since_s = 0.0
        self._deadline_s = group.config.default_deadline_s

    @property
    def num_live(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._live)

    def pass_time(self, arrivals: Arrivals, now: float) -> None:
        """What is due at `now` without any step's end: deadlines, then requests."""
        self.on_time(now)
        for request in arrivals.take(now):
            self.accept(request, now)

    def accept(self, request: SimulatedRequest, now: float) -> bool:
        """Offer a request to the core; False if it is refused, which is counted by reason."""
        measures = self.measures[request.model]
        measures.num_arrived += 1
        try:
            (sequence_id,) = self.core.add_requests([self._request(request, measures.num_arrived)], now)
        except (CapacityError, QueueFullError) as refusal:
            reason = _reason(refusal)
            measures.refused[reason] = measures.refused.get(reason, 0) + 1
            return False
        self._live[sequence_id] = _Live(request, measures)
        return True

    def schedule(self, now: float) -> list[StepDescriptor]:
        """Steps for every free lane."""
        steps = self.core.schedule(now)
        self.core.take_forgotten()  # the workers' share; nobody here holds state for it
        return steps

    def schedule_ahead(self, now: float) -> list[StepDescriptor]:
        """Steps that begin as soon as their lanes' running ones end, without the engine."""
        return self.core.schedule_ahead(now)

    def end_step(self, lane: int, now: float) -> None:
        """The lane's step ends now, with a token for every row that samples; some rows may be of ended sequences."""
        running = self.core.dispatcher.lanes[lane]
        assert running.step is not None, f"lane {lane} is idle"
        step = running.step
        sampled = tuple(
            SampledToken(row.sequence_id, self._next_token(row.sequence_id)) for row in step.rows if row.sample
        )
        result = StepResult(lane=lane, step_seq=step.header.step_seq, sampled=sampled)
        for update in self.core.on_event(StepDone(result=result), now):
            self._record(update, now)

    def num_repeats(self, lane: int) -> int:
        """Like steps in a row that the lane will run if nothing else happens, the one in flight included."""
        count = num_repeats(self.core, lane)
        if count == 1:
            return 1
        return max(1, min(count, min(self._left(sequence.sequence_id) for sequence in self._lane(lane).sequences)))

    def repeat(self, lane: int, count: int, first_s: float, step_s: float) -> None:
        """The lane's step ended at `first_s` and then every `step_s`, `count` times in all; it is in flight again."""
        last_s = first_s + (count - 1) * step_s
        sequences = self._lane(lane).sequences
        repeat_step(self.core, lane, count, TOKEN, last_s)
        for sequence in sequences:
            live = self._live[sequence.sequence_id]
            live.measures.tbt.add(first_s - live.last_s)
            if count > 1:
                live.measures.tbt.add(step_s, count - 1)
            live.measures.num_tokens += count
            live.num_tokens += count
            live.last_s = last_s

    def next_timer(self, now: float) -> float:
        """When `on_time` has to be called if nothing happens before."""
        if self._deadline_s is None:
            return float("inf")
        deadline_s = self.core.next_deadline(now)
        return float("inf") if deadline_s is None else deadline_s

    def on_time(self, now: float) -> None:
        for update in self.core.on_time(now):
            self._record(update, now)

    def observe(self, now: float) -> None:
        """Frames have been held as they are now since the last call. Call it before anything changes."""
        elapsed = now - self._occupied_since_s
        if elapsed > 0:
            for pages, average in self._pages:
                average.add(pages.num_held, elapsed)
            self._occupied_since_s = now

    def _lane(self, lane: int) -> Lane:
        return self.core.dispatcher.lanes[lane]

    def _left(self, sequence_id: int) -> int:
        live = self._live[sequence_id]
        return live.request.output_tokens - live.num_tokens

    def _next_token(self, sequence_id: int) -> int:
        return END_TOKEN if sequence_id not in self._live or self._left(sequence_id) <= 1 else TOKEN

    def _request(self, request: SimulatedRequest, number: int) -> Request:
        prompt = self._prompts.get(request.prompt_tokens)
        if prompt is None:
            prompt = self._prompts[request.prompt_tokens] = [TOKEN] * max(1, request.prompt_tokens)
        sampling = self._sampling.get(request.max_tokens)
        if sampling is None:
            sampling = SamplingParams(max_tokens=request.max_tokens, stop_token_ids=(END_TOKEN,))
            self._sampling[request.max_tokens] = sampling
        deadline_s = None if self._deadline_s is None else request.arrival_s + self._deadline_s
        return Request(
            request_id=f"{request.model}/{number}",
            model=request.model,
            prompt_token_ids=prompt,
            sampling=sampling,
            arrival_s=request.arrival_s,
            deadline_s=deadline_s,
        )

    def _record(self, update: SequenceUpdate, now: float) -> None:
        live = self._live[update.sequence_id]
        measures, request = live.measures, live.request
        if update.token is not None:
            measures.num_tokens += 1
            live.num_tokens += 1
            if live.num_tokens == 1:
                assert update.scheduled_s is not None
                live.admitted_s, live.first_s = update.scheduled_s, now
                measures.queueing.add(update.scheduled_s - request.arrival_s)
                measures.ttft.add(now - request.arrival_s)
            else:
                measures.tbt.add(now - live.last_s)
            live.last_s = now
        if update.finish_reason is None:
            return
        del self._live[update.sequence_id]
        if update.error is not None:
            reason = _reason(update.error)
            measures.refused[reason] = measures.refused.get(reason, 0) + 1
            return
        measures.num_finished += 1
        measures.residence.add(now - live.admitted_s)
        if live.num_tokens > 1:
            measures.request_tbt.add((live.last_s - live.first_s) / (live.num_tokens - 1))


def _reason(error: CrossPoolError) -> str:
    """One word for a refusal."""
    if isinstance(error, ContextLengthError):
        return "context limit"
    if isinstance(error, CapacityError):
        return "KV pool too small"
    if isinstance(error, QueueFullError):
        return "queue full"
    return "deadline passed"
