"""EngineCore: the engine's decisions as one pure state machine. No clock, thread, await or I/O in here.

Time is an argument. The engine thread and the simulator drive it the same way:

    core.on_event(event, now); core.on_time(now)      # outcomes and deadlines in, updates of sequences out
    core.schedule(now)                                # steps out, one for each lane that is free and has work
    core.schedule_ahead(now)                          # steps out that may wait behind running ones
    core.take_copies()                                # what KV workers copy from and to host memory before those steps
    core.mapping_hints(now)                           # what KV workers that map their frames should map now
    core.take_forgotten()                             # sequences whose state the KV workers can drop
    core.next_deadline(now)                           # when to call on_time again if nothing happens
"""

from collections.abc import Sequence as Items

from crosspool.cluster.base import Event, ModelBack, RankFailed, RankLost, RankReady, StepDone, StepFailed, StepTokens
from crosspool.core import FinishReason, Request
from crosspool.engine.config import EngineConfig
from crosspool.engine.dispatcher import Dispatcher
from crosspool.engine.endings import Deadlines, Endings
from crosspool.engine.forecast import output_estimate
from crosspool.engine.intake import Admitter, Intake
from crosspool.engine.limit_change import LimitChange
from crosspool.engine.live_models import LiveModels
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.rank_losses import RankLosses
from crosspool.engine.sequence import Sequence, SequenceUpdate
from crosspool.engine.served_model import ServedModel
from crosspool.engine.snapshot import snapshot
from crosspool.engine.stats import EngineStats
from crosspool.engine.step_log import StepLog
from crosspool.engine.step_outcomes import StepOutcomes
from crosspool.errors import CrossPoolError
from crosspool.kv_pool.ahead import Hint
from crosspool.kv_pool.host_tier import FrameCopy
from crosspool.scheduler.step import StepDescriptor


class EngineCore:
    """Queues, admission, batches, lanes and recovery of all models: puts their parts together and hands on to them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.log = StepLog()
        self.ranks = RankHealth(config.recovery_timeout_s)
        self._sequences: dict[int, Sequence] = {}  # those that have not ended
        self._estimate = output_estimate(config.admission, config.forecast_quantile)
        self._models = models = LiveModels(config, self._estimate)
        self.live_models, self.kv = models.by_name, models.kv
        self.dispatcher = Dispatcher(config, models.by_name, models.kv, self.ranks)
        self._admitter = Admitter(config, models, self.ranks)
        self._intake = Intake(models, self.ranks, self._admitter, self._sequences)
        self._endings = Endings(models, self.dispatcher.parked_steps, self._admitter, self._estimate, self._sequences)
        self._outcomes = StepOutcomes(models, self.dispatcher, self._endings, self.log, config.recovery_timeout_s)
        self._losses = RankLosses(models, self.ranks, self.dispatcher, self._admitter, self._endings)
        self._deadlines = Deadlines(models, self.ranks, self.dispatcher.parked_steps, self._endings)

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        return self.log.num_steps

    def context_limit(self, model: ServedModel) -> int:
        """Prompt plus output tokens a request to `model` may ask for. Raises CapacityError if not one page fits."""
        return self._models.context_limit(model)

    def set_limits(self, change: LimitChange) -> None:
        """Change what models may hold, as `LiveModels.set_limits`; `refuse_unfitting` comes next."""
        self._models.set_limits(change)
        self._admitter.is_due = True

    def trim(self, model: str) -> int:
        """Give the model's cached pages that nobody uses back to the pool; their frames. Raises UnknownModelError."""
        return self.kv.trim(self._models.of(model).model.name)

    def refuse_unfitting(self, now: float) -> list[SequenceUpdate]:
        """End queued sequences that no longer can fit, with the true numbers: nobody waits for what cannot come."""
        return self._endings.refuse_unfitting(now)

    def add_model(self, model: ServedModel) -> None:
        """Serve a model whose ranks have loaded it. Raises as `LiveModels.add`."""
        self._models.add(model)
        self.dispatcher.add_model(model.name)
        for rank in model.placement.ranks:
            self._losses.back(rank, model.name)  # one that was lost meanwhile may load others still

    def drain_model(self, name: str) -> None:
        """Refuse new requests to the model; accepted ones go on."""
        self._models.of(name).draining = True

    def end_model(self, name: str, error: CrossPoolError, now: float) -> list[SequenceUpdate]:
        """Drain, and end what was accepted with `error`."""
        self.drain_model(name)
        return [self._endings.fail(sequence, error, now) for sequence in self._models.of(name).unended()]

    def is_idle(self, name: str) -> bool:
        """Whether nothing of the model is queued, running or in flight."""
        return self._models.of(name).is_idle

    def remove_model(self, name: str) -> None:
        """Forget an idle model."""
        self._models.remove(name)
        self._estimate.forget(name)
        self.log.forget(name)
        self.dispatcher.remove_model(name)

    def add_requests(self, requests: Items[Request], now: float) -> list[int]:
        """Accept one request's sequences, all or none; returns their ids. Raises as `Intake.add`."""
        return self._intake.add(requests, now)

    def end_sequence(self, sequence_id: int, reason: FinishReason, now: float) -> SequenceUpdate | None:
        """End a sequence in any state (a stop string, a client that left); None if it has ended already."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return None
        self._endings.end(sequence, reason)
        return SequenceUpdate.of(sequence, now, finish_reason=reason)

    def on_event(self, event: Event, now: float) -> list[SequenceUpdate]:
        """What an outcome from the cluster means for sequences. Outcomes of steps given up before are ignored."""
        match event:
            case StepTokens(lane=lane, step_seq=step_seq, sampled=sampled):
                return self._outcomes.told(lane, step_seq, sampled, now)
            case StepDone(result=result):
                return self._outcomes.done(result, now)
            case StepFailed():
                return self._outcomes.failed(event, now)
            case RankLost(rank=rank, reason=reason):
                self.dispatcher.prefill_ranks.lost(rank)
                return self._losses.lost(rank, reason, now)
            case ModelBack(rank=rank, model=model):
                self._losses.back(rank, model)
                return []
            case RankReady(rank=rank):
                self._losses.ready(rank)
                return []
            case RankFailed(rank=rank, error=error):
                self.ranks.failed(rank, error, now)
                return self.on_time(now)
            case _:  # models are added and removed by the engine, not by events
                return []

    def on_time(self, now: float) -> list[SequenceUpdate]:
        """End what has waited too long: in a queue past its deadline, or for a lost rank past the recovery bound."""
        return self._deadlines.enforce(now)

    def next_deadline(self, now: float) -> float | None:
        """The next moment at which `on_time` or `schedule` has something to do without any event."""
        return self._deadlines.next(now)

    def schedule(self, now: float) -> list[StepDescriptor]:
        """Admit what fits, then fill every idle lane that has work. Each step is to be handed to the cluster."""
        self._admitter.admit(now)
        return self.dispatcher.fill(now)

    def schedule_ahead(self, now: float) -> list[StepDescriptor]:
        """Steps to hand to the cluster behind running ones, after those of `schedule`. Optional."""
        return self.dispatcher.ahead.fill(now)

    def most_wanted(self) -> list[str]:
        """Models by the number of their sequences that wait for an end, most first."""
        return sorted(self.live_models, key=lambda name: -self.live_models[name].num_unended)

    def mapping_hints(self, now: float) -> dict[str, list[Hint]]:
        """By KV rank whose frames are mapped: pages its models will need, and pages that nobody needs."""
        found = {}
        for kv_rank, pages in self.kv.by_rank.items():
            if pages.ahead is None:
                continue
            here = {name: live.num_live for name, live in self.live_models.items() if kv_rank in live.model.kv_ranks}
            if hints := pages.ahead.hints(here, now, may_withdraw=not pages.budget.is_settling):
                found[kv_rank] = hints
        return found

    def take_copies(self) -> dict[str, tuple[FrameCopy, ...]]:
        """By KV rank: what it has to copy before the steps that were handed out since the last call."""
        tiers = {kv_rank: pages.tier for kv_rank, pages in self.kv.by_rank.items() if pages.tier is not None}
        found = {kv_rank: tier.take_copies() for kv_rank, tier in tiers.items()}
        return {kv_rank: copies for kv_rank, copies in found.items() if copies}

    def take_forgotten(self) -> dict[str, list[int]]:
        """By KV rank: sequences that ended since the last call and that the rank was told of."""
        return self._endings.take_forgotten()

    def stats(self, now: float) -> EngineStats:
        """A snapshot in which every rank's frames used, reserved and free add up to its budget."""
        return snapshot(self, now)
