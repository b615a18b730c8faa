"""EngineCore: the engine's decisions as one pure state machine. No clock, thread, await or I/O in here.

Time is an argument. The engine thread and the simulator drive it the same way:

    core.on_event(event, now); core.on_time(now)      # outcomes and deadlines in, updates of sequences out
    core.schedule(now)                                # steps out, one for each lane that is free and has work
    core.schedule_ahead(now)                          # steps out that may wait behind running ones
    core.mapping_hints(now)                           # what KV workers that map their frames should map now
    core.take_forgotten()                             # sequences whose state the KV workers can drop
    core.next_deadline(now)                           # when to call on_time again if nothing happens
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from crosspool.cluster.base import Event, RankFailed, RankLost, RankReady, StepDone, StepFailed, StepTokens
from crosspool.core import FinishReason, Request, SampledToken
from crosspool.engine.admission import check_length, context_limit
from crosspool.engine.config import EngineConfig
from crosspool.engine.dispatcher import Dispatcher
from crosspool.engine.forecast import output_estimate
from crosspool.engine.kv_pages import KVPages
from crosspool.engine.lanes import Flight, Trouble
from crosspool.engine.limit_change import LimitChange
from crosspool.engine.model_load import ModelLoad
from crosspool.engine.pages import KVRankPages
from crosspool.engine.queues import AdmissionOrder, ModelQueue
from crosspool.engine.ranks import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState, SequenceUpdate
from crosspool.engine.served_model import ServedModel
from crosspool.engine.snapshot import snapshot
from crosspool.engine.stats import EngineStats
from crosspool.engine.step_log import StepLog
from crosspool.errors import (
    CapacityError,
    ConstraintError,
    CrossPoolError,
    DeadlineExceededError,
    ShuttingDownError,
    StepError,
    UnknownModelError,
    WorkerLostError,
)
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.block_table import BlockTable
from crosspool.scheduler.step import StepDescriptor, StepResult

MAX_LOSSES = 5
"""KV ranks a sequence may lose in a row without gaining a token, before it is taken for their cause."""


class EngineCore:
    """Queues, admission, batches, lanes and recovery of all models."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.loads: dict[str, ModelLoad] = {}
        self.pages: dict[str, KVRankPages] = {}
        self.kv = KVPages(self.pages)
        self.ranks = RankHealth(config.recovery_timeout_s)
        self.dispatcher = Dispatcher(config, self.loads, self.kv, self.ranks)
        self.num_steps = 0
        self.last_step_s: float | None = None
        self.log = StepLog()
        self._order = AdmissionOrder(ageing_s=config.ageing_s, bypass_window=config.bypass_window)
        self._estimate = output_estimate(config.admission, config.forecast_quantile)
        self._sequences: dict[int, Sequence] = {}  # those that have not ended
        self._forgotten: dict[str, list[int]] = {}
        self._next_sequence_id = 1
        self._admission_due = False

    def context_limit(self, model: ServedModel) -> int:
        """Prompt plus output tokens a request to `model` may ask for. Raises CapacityError if not one page fits."""
        context_limit(model, self.config.num_frames - 1)  # a page larger than the pool says so first
        reach = {}
        for kv_rank in model.kv_ranks:
            pages = self.pages.get(kv_rank) or self._new_pages(kv_rank)
            try:
                limits = pages.limits if model.name in self.loads else pages.limits_with(model)
            except ValueError as error:
                raise CapacityError(str(error)) from None
            reach[kv_rank] = limits.reach(model.name)
        return context_limit(model, self.kv.reach(model, reach))

    def _reach(self, model: ServedModel) -> int:
        """Frames by which the length of a served model's sequences is bound."""
        return self.kv.reach(model, {rank: self.pages[rank].limits.reach(model.name) for rank in model.kv_ranks})

    def _new_pages(self, kv_rank: str) -> KVRankPages:
        config = self.config
        number = config.kv_ranks.index(kv_rank) if kv_rank in config.kv_ranks else 0
        return KVRankPages(
            kv_rank,
            config.num_frames,
            config.frame_bytes,
            self._estimate,
            caches_prefixes=config.prefix_caching,
            maps_frames=config.kv_backing == "vmm",
            first_frame=number * config.num_frames,
        )

    def set_limits(self, change: LimitChange) -> None:
        """Change what models may hold in the KV pool, at once and as a whole; `refuse_unfitting` comes next.

        Raises UnknownModelError, and ValueError with the true numbers for limits that cannot be held.
        """
        for name in change.models:
            self._load(name)
        changed = {}
        for kv_rank, pages in self.pages.items():
            here = {name for name, load in self.loads.items() if kv_rank in load.model.kv_ranks}
            changed[kv_rank] = pages.changed_limits(change.of(here))
        for kv_rank, limits in changed.items():
            self.pages[kv_rank].set_limits(limits)
        self._admission_due = True

    def trim(self, model: str) -> int:
        """Give the model's cached pages that nobody uses back to the pool; their frames. Raises UnknownModelError."""
        return self.kv.trim(self._load(model).model.name)

    def refuse_unfitting(self, now: float) -> list[SequenceUpdate]:
        """End queued sequences that no longer can fit, with the true numbers: nobody waits for what cannot come."""
        updates = []
        for load in self.loads.values():
            reach = self._reach(load.model)
            for sequence in list(load.queue):
                request = sequence.request
                try:
                    check_length(load.model, reach, len(request.prompt_token_ids), request.sampling.max_tokens)
                except CapacityError as error:
                    updates.append(self._fail(sequence, error, now))
        return updates

    def add_model(self, model: ServedModel) -> None:
        """Serve a model whose ranks have loaded it.

        Raises ValueError for a second one of that name, CapacityError if the pool cannot hold a page of it.
        """
        if model.name in self.loads:
            raise ValueError(f"model {model.name} is already served; remove it first or give another name")
        self.context_limit(model)
        for kv_rank in model.kv_ranks:
            if kv_rank not in self.pages:
                self.pages[kv_rank] = self._new_pages(kv_rank)
        self.kv.add_model(model)
        queue = ModelQueue(model.name, self.config.max_queue, self.config.max_queue_per_key)
        self.loads[model.name] = ModelLoad(model, queue)
        self.dispatcher.add_model(model.name)

    def drain_model(self, name: str) -> None:
        """Refuse new requests to the model; accepted ones go on."""
        self._load(name).draining = True

    def end_model(self, name: str, error: CrossPoolError, now: float) -> list[SequenceUpdate]:
        """Drain, and end what was accepted with `error`."""
        self.drain_model(name)
        return [self._fail(sequence, error, now) for sequence in self._load(name).unended()]

    def is_idle(self, name: str) -> bool:
        """Whether nothing of the model is queued, running or in flight."""
        return self._load(name).is_idle

    def remove_model(self, name: str) -> None:
        """Forget an idle model."""
        load = self._load(name)
        assert load.is_idle, f"model {name} still has sequences; drain or end it first"
        self.kv.remove_model(name)
        self._estimate.forget(name)
        self.log.forget(name)
        self.dispatcher.remove_model(name)
        del self.loads[name]

    def add_requests(self, requests: Items[Request], now: float) -> list[int]:
        """Accept one request's sequences, all or none; returns their ids.

        Raises UnknownModelError, ContextLengthError, CapacityError, QueueFullError, WorkerLostError, ShuttingDownError.
        """
        load = self._load(requests[0].model)
        try:
            return self._accept(load, requests, now)
        except CrossPoolError:
            load.num_refused += len(requests)
            raise

    def _accept(self, load: ModelLoad, requests: Items[Request], now: float) -> list[int]:
        if load.draining:
            raise ShuttingDownError(f"model {load.model.name} is being removed and takes no new requests")
        expires_s = load.expires_s(self.ranks)
        if expires_s is not None and expires_s <= now:
            raise WorkerLostError(self.ranks.describe(load.ranks, now))
        num_frames = self._reach(load.model)
        for request in requests:
            check_length(load.model, num_frames, len(request.prompt_token_ids), request.sampling.max_tokens)
        sequences = [self._new_sequence(load, request) for request in requests]
        for sequence in sequences:
            load.queue.push(sequence)
        self._admission_due = True
        self._admit(now)  # so that the bound holds for what really has to wait
        if (refusal := load.queue.overflow(len(requests), requests[0].key)) is not None:
            for sequence in sequences:
                self._withdraw(load, sequence)
            raise refusal
        for sequence in sequences:
            self._sequences[sequence.sequence_id] = sequence
        load.num_accepted += len(sequences)
        return [sequence.sequence_id for sequence in sequences]

    def _new_sequence(self, load: ModelLoad, request: Request) -> Sequence:
        sequence_id = self._next_sequence_id
        self._next_sequence_id += 1
        return Sequence(sequence_id=sequence_id, request=request, table=BlockTable(load.model.page_tokens))

    def _withdraw(self, load: ModelLoad, sequence: Sequence) -> None:
        """Take back a sequence that was just pushed; it may have been admitted, but no step has a row of it."""
        if sequence.state is SequenceState.QUEUED:
            load.queue.remove(sequence)
        else:
            load.leave(sequence)
            self.kv.of(sequence).release(sequence)

    def end_sequence(self, sequence_id: int, reason: FinishReason, now: float) -> SequenceUpdate | None:
        """End a sequence in any state (a stop string, a client that left); None if it has ended already.

        Its pages are free at once, or when the step in flight that uses them ends.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return None
        self._end(sequence, reason)
        return self._update(sequence, now, finish_reason=reason)

    def num_unended(self) -> int:
        """Accepted sequences that still owe their caller an end."""
        return len(self._sequences)

    def on_event(self, event: Event, now: float) -> list[SequenceUpdate]:
        """What an outcome from the cluster means for sequences. Outcomes of steps given up before are ignored."""
        match event:
            case StepTokens(lane=lane, step_seq=step_seq, sampled=sampled):
                return self._step_told(lane, step_seq, sampled, now)
            case StepDone(result=result):
                return self._step_done(result, now)
            case StepFailed():
                return self._step_failed(event, now)
            case RankLost(rank=rank, reason=reason):
                return self._rank_lost(rank, reason, now)
            case RankReady(rank=rank):
                self.ranks.ready(rank)
                if rank in self.pages:
                    self.pages[rank].nothing_is_mapped()  # what was released since its loss is not either
                self._admission_due = True
                return []
            case RankFailed(rank=rank, error=error):
                self.ranks.failed(rank, error, now)
                return self.on_time(now)
            case _:  # models are added and removed by the engine, not by events
                return []

    def on_time(self, now: float) -> list[SequenceUpdate]:
        """End what has waited too long: in a queue past its deadline, or for a lost rank past the recovery bound."""
        updates = []
        for load in self.loads.values():
            for sequence in load.queue.expired(now) if not load.queue.is_empty else ():
                waited_s = now - sequence.request.arrival_s
                error = (
                    f"request {sequence.request.request_id} waited {waited_s:.1f} s in the queue of {load.model.name}"
                )
                updates.append(self._fail(sequence, DeadlineExceededError(f"{error}, past its deadline"), now))
            expires_s = load.expires_s(self.ranks)
            if expires_s is not None and expires_s <= now:
                lost = WorkerLostError(self.ranks.describe(load.ranks, now))
                updates += [self._fail(sequence, lost, now) for sequence in load.unended()]
        for parked in list(self.dispatcher.parked):
            if parked.trouble.first_failed_s + self.config.recovery_timeout_s <= now:
                updates += self._fail_all(parked.sequences, WorkerLostError(self._give_up(parked.trouble)), now)
        return updates

    def next_deadline(self, now: float) -> float | None:
        """The next moment at which `on_time` or `schedule` has something to do without any event."""
        moments: list[float | None] = []
        for load in self.loads.values():
            if not load.queue.is_empty:
                moments.append(load.queue.next_deadline())
            if self.ranks.any_down and load.owes:
                moments.append(load.expires_s(self.ranks))
        moments += [pages.ahead.next_moment() for pages in self.pages.values() if pages.ahead is not None]
        for parked in self.dispatcher.parked:
            moments.append(parked.trouble.first_failed_s + self.config.recovery_timeout_s)
            if self.ranks.are_up(parked.ranks) and parked.not_before_s > now:
                moments.append(parked.not_before_s)
        return min((moment for moment in moments if moment is not None), default=None)

    def _step_done(self, result: StepResult, now: float) -> list[SequenceUpdate]:
        flight = self.dispatcher.ended(result.lane, result.step_seq, now)
        if flight is None:
            return []
        self.num_steps += 1 + flight.num_told
        self.last_step_s = now
        self.log.add(flight.step.header, flight.started_s, now, result, 1 + flight.num_told)
        for sequence in flight.sequences:
            if sequence.state is SequenceState.ENDED:
                self._release_unused(sequence)
        return self._take_in(flight, result.sampled, now)

    def _step_told(
        self, lane: int, step_seq: int, sampled: tuple[SampledToken, ...], now: float
    ) -> list[SequenceUpdate]:
        flight = self.dispatcher.told(lane, step_seq)
        return [] if flight is None else self._take_in(flight, sampled, now)

    def _take_in(self, flight: Flight, tokens: tuple[SampledToken, ...], now: float) -> list[SequenceUpdate]:
        """What a step, or a step of a run, did for those of its sequences that have not ended."""
        sampled = {token.sequence_id: token for token in tokens}
        updates = []
        for row, sequence in zip(flight.step.rows, flight.sequences, strict=True):
            if sequence.state is SequenceState.ENDED:
                continue
            sequence.num_cached_tokens += row.num_new_tokens
            self.kv.of(sequence).step_ended(sequence)
            if row.sample:
                updates.append(self._accept_token(sequence, sampled[row.sequence_id], now))
        return updates

    def _accept_token(self, sequence: Sequence, token: SampledToken, now: float) -> SequenceUpdate:
        load = self.loads[sequence.request.model]
        if sequence.state is SequenceState.PREFILLING:
            load.prompt_tokens += sequence.num_prompt_tokens if sequence.num_generated_tokens == 0 else 0
            load.enter(sequence, SequenceState.DECODING)
        sequence.request.output_token_ids.append(token.token_id)
        sequence.num_losses = 0
        load.generated_tokens += 1
        reason = sequence.end_after(token.token_id)
        if reason is not None:
            self._end(sequence, reason)
        elif sequence.request.constraint is not None:
            try:
                sequence.request.constraint.advance(token.token_id)
            except ConstraintError as error:
                return self._fail(sequence, error, now)
        return self._update(sequence, now, token=token, finish_reason=reason)

    def _step_failed(self, event: StepFailed, now: float) -> list[SequenceUpdate]:
        flight, behind = self.dispatcher.failed(event.lane, event.step_seq, now)
        for sequence in dict.fromkeys((*(() if flight is None else flight.sequences), *behind)):
            if sequence.state is SequenceState.ENDED:
                self._release_unused(sequence)
        if flight is None:
            return []
        trouble = flight.trouble or Trouble(now, 0, event.error)
        trouble.num_failures += 1
        trouble.error = event.error
        step, sequences = flight.step.advanced(flight.num_told), flight.sequences
        alive = [sequence for sequence in sequences if sequence.state is not SequenceState.ENDED]
        if event.fatal:
            if len(sequences) == 1:
                return self._fail_all(alive, StepError(event.error), now)
            self.dispatcher.isolate(step, sequences, trouble, now)
            return []
        if self.config.recovery_timeout_s == 0:
            return self._fail_all(alive, WorkerLostError(self._give_up(trouble)), now)
        if alive:
            self.dispatcher.park(step, sequences, trouble, now)
        return []

    def _rank_lost(self, rank: str, reason: str, now: float) -> list[SequenceUpdate]:
        self.ranks.lost(rank, reason, now)
        updates = []
        if rank in self.pages:
            updates += self._kv_lost(rank, reason, now)
        if self.config.recovery_timeout_s == 0:
            error = WorkerLostError(f"rank {rank} was lost ({reason}); the recovery timeout is 0")
            for load in self.loads.values():
                if rank in load.ranks and load.expires_s(self.ranks) is not None:
                    updates += self._fail_all(list(load.unended()), error, now)
        return updates

    def _kv_lost(self, rank: str, reason: str, now: float) -> list[SequenceUpdate]:
        """The rank's sequences go back to the head of their queues, to be prefilled from all tokens they have."""
        self.dispatcher.kv_rank_lost(rank)
        updates = []
        for load in self.loads.values():
            hit = [home for home, needs in load.needs.items() if rank in needs]
            for sequence in [sequence for sequence in load.lingering.values() if sequence.kv_rank in hit]:
                self._release(sequence)
            for sequence in [sequence for sequence in load.live() if sequence.kv_rank in hit]:
                self._release(sequence)
                sequence.rewind()
                sequence.num_losses += 1
                load.num_preempted += 1
                load.queue.push(sequence)
                if sequence.num_losses > MAX_LOSSES:
                    times = f"{sequence.num_losses} times in a row without a token"
                    error = WorkerLostError(f"rank {rank} was lost under this request {times}; last: {reason}")
                    updates.append(self._fail(sequence, error, now))
        self.pages[rank].memory_lost()
        self._forgotten.pop(rank, None)
        return updates + self.refuse_unfitting(now)  # limits may have been set below what those that ran were promised

    def _give_up(self, trouble: Trouble) -> str:
        return (
            f"a step failed {trouble.num_failures} times within {self.config.recovery_timeout_s:g} s of recovery time; "
            f"last: {trouble.error}"
        )

    def schedule(self, now: float) -> list[StepDescriptor]:
        """Admit what fits, then fill every idle lane that has work. Each step is to be handed to the cluster."""
        self._admit(now)
        return self.dispatcher.fill(now)

    def schedule_ahead(self, now: float) -> list[StepDescriptor]:
        """Steps to hand to the cluster behind running ones, after those of `schedule`. Optional: a driver whose ranks
        need not wait for it gains nothing by it.
        """
        return self.dispatcher.fill_ahead(now)

    def mapping_hints(self, now: float) -> dict[str, list[Hint]]:
        """By KV rank whose frames are mapped: pages its models will need, and pages that nobody needs."""
        found = {}
        for kv_rank, pages in self.pages.items():
            if pages.ahead is None:
                continue
            here = {name: load.num_live for name, load in self.loads.items() if kv_rank in load.model.kv_ranks}
            if hints := pages.ahead.hints(here, now, may_withdraw=not pages.budget.is_settling):
                found[kv_rank] = hints
        return found

    def take_forgotten(self) -> dict[str, list[int]]:
        """By KV rank: sequences that ended since the last call and that the rank was told of."""
        forgotten, self._forgotten = self._forgotten, {}
        return forgotten

    def _admit(self, now: float) -> None:
        if not self._admission_due:
            return
        self._admission_due = False
        for names in self.kv.groups:
            loads = [self.loads[name] for name in names]
            while self._admit_one(loads, now):
                pass
        self._admission_due |= self.kv.has_stalled

    def _admit_one(self, loads: Items[ModelLoad], now: float) -> bool:
        """Admit the next sequence of models that have KV ranks in common, if one may come in now."""
        kv = self.kv
        homes = {
            load.model.name: [home for home in load.homes_up(self.ranks) if kv.is_open(load.model.name, home)]
            for load in loads
            if load.num_live < self.config.max_num_seqs
        }
        queues = [load.queue for load in loads if homes.get(load.model.name)]

        def fits(sequence: Sequence) -> bool:
            return kv.home_for(sequence, homes[sequence.request.model]) is not None

        sequence = self._order.pick(queues, now, kv.frames_used, fits, kv.is_capped, kv.is_floored)
        if sequence is None:
            return False
        load = self.loads[sequence.request.model]
        home = kv.home_for(sequence, homes[load.model.name])
        assert home is not None
        load.queue.take(sequence, now)
        kv.admit(sequence, home)
        load.enter(sequence, SequenceState.PREFILLING)
        return True

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        load = self.loads[sequence.request.model]
        del self._sequences[sequence.sequence_id]
        load.num_finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._estimate.record(load.model.name, sequence.num_generated_tokens)
        self._admission_due = True
        if sequence.state is SequenceState.QUEUED:
            sequence.state = SequenceState.ENDED
            load.queue.remove(sequence)
            return
        load.enter(sequence, SequenceState.ENDED)
        self.dispatcher.drop_parked_row(sequence)
        if sequence.in_step:
            self.kv.of(sequence).stop_growing(sequence)
        else:
            self._release(sequence)

    def _release_unused(self, sequence: Sequence) -> None:
        """`_release` an ended sequence unless the step behind the one that it has left uses its pages."""
        if not sequence.in_step:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free the pages of an ended sequence that no step uses any more."""
        load = self.loads[sequence.request.model]
        load.leave(sequence)
        self.kv.of(sequence).release(sequence)
        if sequence.joined:
            for rank in load.needs[sequence.kv_rank]:
                if rank in load.model.kv_ranks:
                    self._forgotten.setdefault(rank, []).append(sequence.sequence_id)
        self._admission_due = True

    def _fail(self, sequence: Sequence, error: CrossPoolError, now: float) -> SequenceUpdate:
        self._end(sequence, FinishReason.ERROR)
        return self._update(sequence, now, finish_reason=FinishReason.ERROR, error=error)

    def _fail_all(self, sequences: Iterable[Sequence], error: CrossPoolError, now: float) -> list[SequenceUpdate]:
        return [self._fail(sequence, error, now) for sequence in list(sequences)]

    def _update(
        self,
        sequence: Sequence,
        now: float,
        *,
        token: SampledToken | None = None,
        finish_reason: FinishReason | None = None,
        error: CrossPoolError | None = None,
    ) -> SequenceUpdate:
        return SequenceUpdate(
            sequence_id=sequence.sequence_id,
            time_s=now,
            scheduled_s=sequence.scheduled_s,
            cached_tokens=sequence.num_reused_tokens,
            token=token,
            finish_reason=finish_reason,
            error=error,
        )

    def stats(self, now: float) -> EngineStats:
        """A snapshot in which every rank's frames used, reserved and free add up to its budget."""
        return snapshot(self, now)

    def _load(self, name: str) -> ModelLoad:
        if name not in self.loads:
            served = ", ".join(self.loads) or "none"
            raise UnknownModelError(f"no model {name!r} is served; served models: {served}")
        return self.loads[name]
