"""RankLosses: what the loss of a rank, and its return, mean for sequences and their pages."""

from crosspool.engine.dispatcher import Dispatcher
from crosspool.engine.endings import Endings
from crosspool.engine.intake import Admitter
from crosspool.engine.live_models import LiveModels
from crosspool.engine.rank_health import RankHealth
from crosspool.engine.sequence import SequenceUpdate
from crosspool.errors import WorkerLostError

MAX_LOSSES = 5
"""KV ranks a sequence may lose in a row without gaining a token, before it is taken for their cause."""


class RankLosses:
    """Sends sequences that have lost their KV back to their queues. Steps that need other ranks wait: `ParkedSteps`."""

    def __init__(
        self, models: LiveModels, ranks: RankHealth, dispatcher: Dispatcher, admitter: Admitter, endings: Endings
    ) -> None:
        self._live_models, self._pages = models.by_name, models.kv.by_rank
        self._ranks = ranks
        self._dispatcher = dispatcher
        self._admitter = admitter
        self._endings = endings
        self._away: set[str] = set()  # lost ranks that hold no model again

    def lost(self, rank: str, reason: str, now: float) -> list[SequenceUpdate]:
        self._ranks.lost(rank, reason, now)
        self._away.add(rank)
        updates = []
        if rank in self._pages:
            updates += self._kv_lost(rank, reason, now)
        if self._ranks.recovery_timeout_s == 0:
            error = WorkerLostError(f"rank {rank} was lost ({reason}); the recovery timeout is 0")
            for live in self._live_models.values():
                if rank in live.ranks and live.expires_s(self._ranks) is not None:
                    updates += self._endings.fail_all(list(live.unended()), error, now)
        return updates

    def back(self, rank: str, model: str) -> None:
        """The rank, if it was lost, is back with this model, and loads others still."""
        self._ranks.back(rank, model)
        self._started_anew(rank)

    def ready(self, rank: str) -> None:
        """The rank is back, with all its models."""
        self._ranks.ready(rank)
        self._started_anew(rank)

    def _started_anew(self, rank: str) -> None:
        """The rank has its first model again, or one more."""
        if rank in self._away and rank in self._pages:
            self._pages[rank].nothing_is_mapped()  # what was released since its loss is not either
        self._away.discard(rank)
        self._admitter.is_due = True

    def _kv_lost(self, rank: str, reason: str, now: float) -> list[SequenceUpdate]:
        """The rank's sequences go back to the head of their queues, to be prefilled from all tokens they have."""
        self._dispatcher.kv_rank_lost(rank)
        updates = []
        for live in self._live_models.values():
            hit = [home for home, needs in live.needs.items() if rank in needs]
            for sequence in [sequence for sequence in live.lingering.values() if sequence.kv_rank in hit]:
                self._endings.release(sequence)
            for sequence in [sequence for sequence in live.live_sequences() if sequence.kv_rank in hit]:
                self._endings.release(sequence)
                sequence.rewind()
                sequence.num_losses += 1
                live.num_preempted += 1
                live.queue.push(sequence)
                if sequence.num_losses > MAX_LOSSES:
                    times = f"{sequence.num_losses} times in a row without a token"
                    error = WorkerLostError(f"rank {rank} was lost under this request {times}; last: {reason}")
                    updates.append(self._endings.fail(sequence, error, now))
        self._pages[rank].memory_lost()
        self._endings.rank_lost(rank)
        # Limits may have been set below what those that ran were promised.
        return updates + self._endings.refuse_unfitting(now)
