"""Deadlines: what ends because it has waited too long, and when the core next has something to do without an event."""

from crosspool.engine.endings import Endings
from crosspool.engine.model_loads import ModelLoads
from crosspool.engine.parked_steps import ParkedSteps
from crosspool.engine.ranks import RankHealth
from crosspool.engine.sequence import SequenceUpdate
from crosspool.errors import DeadlineExceededError, WorkerLostError


class Deadlines:
    """Bounds waits: in a queue, for a lost rank, and for a replay."""

    def __init__(self, models: ModelLoads, ranks: RankHealth, parked: ParkedSteps, endings: Endings) -> None:
        self._loads, self._pages = models.by_name, models.pages
        self._ranks = ranks
        self._parked = parked
        self._endings = endings

    def enforce(self, now: float) -> list[SequenceUpdate]:
        """End what has waited too long: in a queue past its deadline, or for a lost rank past the recovery bound."""
        updates = []
        any_down = self._ranks.any_down
        for load in self._loads.values():
            for sequence in load.queue.expired(now) if not load.queue.is_empty else ():
                waited_s = now - sequence.request.arrival_s
                error = (
                    f"request {sequence.request.request_id} waited {waited_s:.1f} s in the queue of {load.model.name}"
                )
                late = DeadlineExceededError(f"{error}, past its deadline")
                updates.append(self._endings.fail(sequence, late, now))
            expires_s = load.expires_s(self._ranks) if any_down else None
            if expires_s is not None and expires_s <= now:
                lost = WorkerLostError(self._ranks.describe(load.ranks, now))
                updates += [self._endings.fail(sequence, lost, now) for sequence in load.unended()]
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
        for load in self._loads.values():
            if not load.queue.is_empty:
                moments.append(load.queue.next_deadline())
            if any_down and load.owes:
                moments.append(load.expires_s(self._ranks))
        moments += [pages.ahead.next_moment() for pages in self._pages.values() if pages.ahead is not None]
        for parked in self._parked.steps:
            moments.append(parked.trouble.first_failed_s + self._ranks.recovery_timeout_s)
            if self._ranks.are_up(parked.ranks) and parked.not_before_s > now:
                moments.append(parked.not_before_s)
        return min((moment for moment in moments if moment is not None), default=None)
