"""Bounded queues of one model each, and which queued sequence is admitted next.

Models come in the order of the frames they hold, fewest first. A sequence that is first of its queue and lacks pages
is *blocked*: later ones may pass it for `ageing_s`, after which it has aged and nothing else is admitted on its KV
rank. So a big request waits, from the moment it is first in its queue, at most `ageing_s`, plus one aged request of
each other model, plus the rest of the sequences then live; and a small one behind it at most until it is admitted.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from crosspool.engine.sequence import Sequence
from crosspool.errors import QueueFullError

PRIORITY_STEP_S = 1.0
MAX_PRIORITY_S = 3600.0
"""Arrival time that one step of priority is worth, and the most of it: finite, so that no priority starves another."""

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
ADMISSION_TIMES_KEPT = 16


def _place(sequence: Sequence) -> tuple[bool, float, int]:
    """Sort key: sequences that have been admitted before (and lost their KV) first, then by arrival and priority."""
    request = sequence.request
    fresh = sequence.scheduled_s is None
    credit_s = max(-MAX_PRIORITY_S, min(MAX_PRIORITY_S, PRIORITY_STEP_S * request.priority))
    return (fresh, request.arrival_s + credit_s, sequence.sequence_id)


class ModelQueue:
    """The queue of one model. The bound holds for new requests; sequences that lost their KV always come back."""

    def __init__(self, model: str, max_queue: int) -> None:
        self.model = model
        self.max_queue = max_queue
        self._waiting: list[Sequence] = []
        self._admission_times_s: deque[float] = deque(maxlen=ADMISSION_TIMES_KEPT)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def first(self, count: int) -> list[Sequence]:
        return self._waiting[:count]

    def full_error(self, num_new: int) -> QueueFullError:
        """The refusal of `num_new` sequences that came to a full queue."""
        retry_after_s = self.retry_after_s()
        return QueueFullError(
            f"the queue of {self.model} is full: it takes {self.max_queue} requests beside the running ones and "
            f"{num_new} more came; try again in {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )

    def push(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        sequence.blocked_since_s = None

    def take(self, sequence: Sequence, now: float) -> None:
        """Remove an admitted sequence."""
        self.remove(sequence)
        self._admission_times_s.append(now)

    def expired(self, now: float) -> list[Sequence]:
        """Sequences past their deadline that no work has been spent on."""
        return [
            sequence
            for sequence in self._waiting
            if sequence.scheduled_s is None
            and sequence.request.deadline_s is not None
            and sequence.request.deadline_s <= now
        ]

    def next_deadline(self) -> float | None:
        if not self._waiting:
            return None
        deadlines = [s.request.deadline_s for s in self._waiting if s.scheduled_s is None]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def retry_after_s(self) -> float:
        """Mean time between the last admissions: about when the next place comes free."""
        times = self._admission_times_s
        mean_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, mean_s))


class AdmissionOrder:
    """Picks the next sequence to admit over all models of one KV rank."""

    def __init__(self, *, ageing_s: float, bypass_window: int) -> None:
        self.ageing_s = ageing_s
        self.bypass_window = bypass_window

    def pick(
        self,
        queues: Iterable[ModelQueue],
        now: float,
        frames_held: Callable[[str], int],
        fits: Callable[[Sequence], bool],
    ) -> Sequence | None:
        """The sequence to admit now, or None. `queues`: those of models that have a free place and their ranks up."""
        by_share = sorted((queue for queue in queues if len(queue)), key=lambda queue: frames_held(queue.model))
        aged = self._first_aged(by_share, now)
        if aged is not None:
            return aged if fits(aged) else None
        for queue in by_share:
            head, *others = queue.first(1 + self.bypass_window)
            if fits(head):
                return head
            if head.blocked_since_s is None:
                head.blocked_since_s = now
            for sequence in others:
                if fits(sequence):
                    return sequence
        return None

    def _first_aged(self, queues: Iterable[ModelQueue], now: float) -> Sequence | None:
        blocked = [
            (head.blocked_since_s, head.sequence_id, head)
            for queue in queues
            for head in queue.first(1)
            if head.blocked_since_s is not None and now - head.blocked_since_s >= self.ageing_s
        ]
        return min(blocked)[2] if blocked else None
