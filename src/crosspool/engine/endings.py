"""How a sequence ends in any state, when its pages come back, and what ends because it has waited too long."""

from collections.abc import Iterable

from crosspool.core import FinishReason
from crosspool.engine.forecast import OutputEstimate
from crosspool.engine.intake import Admitter
from crosspool.engine.lengths import check_length
from crosspool.engine.live_models import LiveModels
from crosspool.engine.parked_steps import ParkedSteps
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.sequence import Sequence, SequenceState, SequenceUpdate
from crosspool.errors import CapacityError, CrossPoolError, DeadlineExceededError, WorkerLostError


class Endings:
    """Takes ended sequences out of `sequences`, frees what they hold, and remembers whom KV workers can forget."""

    def __init__(
        self,
        models: LiveModels,
        parked: ParkedSteps,
        admitter: Admitter,
        estimate: OutputEstimate,
        sequences: dict[int, Sequence],
    ) -> None:
        self._models = models
        self._live_models, self._kv = models.by_name, models.kv
        self._parked = parked
        self._admitter = admitter
        self._estimate = estimate
        self._sequences = sequences
        self._forgotten: dict[str, list[int]] = {}

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Its pages are free at once, or when the step in flight that uses them ends."""
        live = self._live_models[sequence.request.model]
        del self._sequences[sequence.sequence_id]
        live.num_finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._estimate.record(live.model.name, sequence.num_generated_tokens)
        self._admitter.is_due = True
        if sequence.state is SequenceState.QUEUED:
            sequence.state = SequenceState.ENDED
            live.queue.remove(sequence)
            return
        live.enter(sequence, SequenceState.ENDED)
        self._parked.drop(sequence)
        if sequence.in_step:
            self._kv.of(sequence).stop_growing(sequence)
        else:
            self.release(sequence)

    def fail(self, sequence: Sequence, error: CrossPoolError, now: float) -> SequenceUpdate:
        self.end(sequence, FinishReason.ERROR)
        return SequenceUpdate.of(sequence, now, finish_reason=FinishReason.ERROR, error=error)

    def fail_all(self, sequences: Iterable[Sequence], error: CrossPoolError, now: float) -> list[SequenceUpdate]:
        return [self.fail(sequence, error, now) for sequence in list(sequences)]

    def refuse_unfitting(self, now: float) -> list[SequenceUpdate]:
        """End queued sequences that no longer can fit, with the true numbers: nobody waits for what cannot come."""
        updates = []
        for live in self._live_models.values():
            reach = self._models.kv.reach(live.model)
            for sequence in list(live.queue):
                request = sequence.request
                try:
                    check_length(live.model, reach, len(request.prompt_token_ids), request.sampling.max_tokens)
                except CapacityError as error:
                    updates.append(self.fail(sequence, error, now))
        return updates

    def release_unused(self, sequences: Iterable[Sequence]) -> None:
        """`release` those that have ended, unless the step behind the one that they have left uses their pages."""
        for sequence in sequences:
            if sequence.state is SequenceState.ENDED and not sequence.in_step:
                self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that no step uses any more."""
        live = self._live_models[sequence.request.model]
        live.leave(sequence)
        self._kv.of(sequence).release(sequence)
        if sequence.joined:
            for rank in live.needs[sequence.kv_rank]:
                if rank in live.model.kv_ranks:
                    self._forgotten.setdefault(rank, []).append(sequence.sequence_id)
        self._admitter.is_due = True

    def take_forgotten(self) -> dict[str, list[int]]:
        """By KV rank: sequences that were released since the last call and that the rank was told of."""
        forgotten, self._forgotten = self._forgotten, {}
        return forgotten

    def rank_lost(self, kv_rank: str) -> None:
        """The rank has forgotten everyone by itself."""
        self._forgotten.pop(kv_rank, None)


class Deadlines:
    """Bounds waits: in a queue, for a lost rank, and for a replay."""

    def __init__(self, models: LiveModels, ranks: RankHealth, parked: ParkedSteps, endings: Endings) -> None:
        self._live_models, self._pages = models.by_name, models.kv.by_rank
        self._ranks = ranks
        self._parked = parked
        self._endings = endings

    def enforce(self, now: float) -> list[SequenceUpdate]:
        """End what has waited too long: in a queue past its deadline, or for a lost rank past the recovery bound."""
        updates = []
        any_down = self._ranks.any_down
        for live in self._live_models.values():
            for sequence in live.queue.expired(now) if not live.queue.is_empty else ():
                waited_s = now - sequence.request.arrival_s
                error = (
                    f"request {sequence.request.request_id} waited {waited_s:.1f} s in the queue of {live.model.name}"
                )
                late = DeadlineExceededError(f"{error}, past its deadline")
                updates.append(self._endings.fail(sequence, late, now))
            expires_s = live.expires_s(self._ranks) if any_down else None
            if expires_s is not None and expires_s <= now:
                lost = WorkerLostError(self._ranks.describe(live.ranks, live.model.name, now))
                updates += [self._endings.fail(sequence, lost, now) for sequence in live.unended()]
        timeout_s = self._ranks.recovery_timeout_s
        for parked in list(self._parked.steps):
            if parked.trouble.first_failed_s + timeout_s <= now:
                given_up = WorkerLostError(parked.trouble.describe(timeout_s))
                updates += self._endings.fail_all(parked.sequences, given_up, now)
        return updates

    def next(self, now: float) -> float | None:
        """The next moment at which something is to be ended, replayed or mapped; None if nothing waits for time."""
        moments: list[float | None] = []
        any_down = self._ranks.any_down
        for live in self._live_models.values():
            if not live.queue.is_empty:
                moments.append(live.queue.next_deadline())
            if any_down and live.owes:
                moments.append(live.expires_s(self._ranks))
        moments += [pages.ahead.next_moment() for pages in self._pages.values() if pages.ahead is not None]
        for parked in self._parked.steps:
            moments.append(parked.trouble.first_failed_s + self._ranks.recovery_timeout_s)
            if self._ranks.are_up(parked.ranks, parked.step.header.model) and parked.not_before_s > now:
                moments.append(parked.not_before_s)
        return min((moment for moment in moments if moment is not None), default=None)
