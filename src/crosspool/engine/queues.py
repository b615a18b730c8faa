"""Bounded queues of one model each, and which queued sequence is admitted next.

Models come in the order of the frames they hold, fewest first. A sequence that is first of its queue and lacks pages
is *blocked*: later ones may pass it for `ageing_s`, after which it has aged and nothing else is admitted on its KV
rank but what fits the floor of its own model, which the aged one could not have. One that the ceiling of its model
keeps out holds back its own model alone. So a big request waits, from the moment it is first in its queue, at most
`ageing_s`, plus one aged request of each other model and API key, plus the rest of the sequences then live; and a
small one behind it at most until it is admitted. Within a model, API keys take turns: a key whose request is first of
its line waits for one admission of each other key.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, zip_longest

from crosspool.engine.sequence import Sequence
from crosspool.errors import QueueFullError

PRIORITY_STEP_S = 1.0
MAX_PRIORITY_S = 3600.0
"""Arrival time that one step of priority is worth, and the most of it: finite, so that no priority starves another."""

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
ADMISSION_TIMES_KEPT = 16


def _place(sequence: Sequence) -> tuple[float, int]:
    """Sort key of a line: by arrival and priority."""
    request = sequence.request
    credit_s = max(-MAX_PRIORITY_S, min(MAX_PRIORITY_S, PRIORITY_STEP_S * request.priority))
    return (request.arrival_s + credit_s, sequence.sequence_id)


class ModelQueue:
    """The queue of one model, in which API keys take turns.

    Each key has a line of its own, in the order of `_place`. The key served longest ago comes first, so while a key
    waits, each other key is served at most once before it. Sequences that lost their KV come before every line, in
    whatever number: the bounds hold for new requests only.
    """

    def __init__(self, model: str, max_queue: int, max_queue_per_key: int | None = None) -> None:
        self.model = model
        self.max_queue = max_queue
        self.max_queue_per_key = max_queue_per_key
        self._lines: dict[str, list[Sequence]] = {}  # by API key; none is empty
        self._returning: list[Sequence] = []
        self._last_turn: dict[str, int] = {}  # by API key: the number of its last admission
        self._num_turns = 0
        self._admission_times_s: deque[float] = deque(maxlen=ADMISSION_TIMES_KEPT)

    @property
    def is_empty(self) -> bool:
        return not (self._lines or self._returning)

    def __len__(self) -> int:
        return len(self._returning) + sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they would be admitted if no more came: a round takes one of each line."""
        yield from self._returning
        for round_ in zip_longest(*self._lines_in_turn()):
            yield from (sequence for sequence in round_ if sequence is not None)

    def first(self, count: int) -> list[Sequence]:
        return list(islice(self, count))

    def heads(self) -> list[Sequence]:
        """The first of each line."""
        return [*self._returning[:1], *(line[0] for line in self._lines_in_turn())]

    def overflow(self, num_new: int, key: str) -> QueueFullError | None:
        """The refusal of `num_new` sequences of `key` that were just pushed, if they are too many."""
        if len(self) > self.max_queue:
            bound = f"the queue of {self.model} is full: it takes {self.max_queue} requests beside the running ones"
        elif self.max_queue_per_key is not None and len(self._lines.get(key, ())) > self.max_queue_per_key:
            bound = f"this API key may have {self.max_queue_per_key} requests in the queue of {self.model}"
        else:
            return None
        retry_after_s = self.retry_after_s()
        return QueueFullError(
            f"{bound} and {num_new} more came; try again in {retry_after_s:.0f} s", retry_after_s=retry_after_s
        )

    def push(self, sequence: Sequence) -> None:
        insort(self._line(sequence), sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        line = self._line(sequence)
        line.remove(sequence)
        if not line and line is not self._returning:
            del self._lines[sequence.request.key]
        sequence.blocked_since_s = None

    def take(self, sequence: Sequence, now: float) -> None:
        """Remove an admitted sequence; its key's next turn comes after everyone else's."""
        self.remove(sequence)
        if sequence.scheduled_s is None:
            self._num_turns += 1
            self._last_turn[sequence.request.key] = self._num_turns
        self._admission_times_s.append(now)

    def _line(self, sequence: Sequence) -> list[Sequence]:
        if sequence.scheduled_s is not None:
            return self._returning
        return self._lines.setdefault(sequence.request.key, [])

    def _lines_in_turn(self) -> list[list[Sequence]]:
        lines = [(self._last_turn.get(key, 0), _place(line[0]), line) for key, line in self._lines.items()]
        return [line for _, _, line in sorted(lines, key=lambda entry: entry[:2])]

    def expired(self, now: float) -> list[Sequence]:
        """Sequences past their deadline that no work has been spent on."""
        return [
            sequence
            for line in self._lines.values()
            for sequence in line
            if sequence.request.deadline_s is not None and sequence.request.deadline_s <= now
        ]

    def next_deadline(self) -> float | None:
        deadlines = (sequence.request.deadline_s for line in self._lines.values() for sequence in line)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def retry_after_s(self) -> float:
        """Mean time between the last admissions: about when the next place comes free."""
        times = self._admission_times_s
        mean_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, mean_s))


def _never(sequence: Sequence) -> bool:
    return False


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
        is_capped: Callable[[Sequence], bool] = _never,
        is_floored: Callable[[Sequence], bool] = _never,
    ) -> Sequence | None:
        """The sequence to admit now, or None. `queues`: those of models that have a free place and their ranks up.

        is_capped: its model's ceiling keeps it out, however much is free. is_floored: its model's floor holds it.
        """
        by_share = sorted((queue for queue in queues if len(queue)), key=lambda queue: frames_held(queue.model))
        for aged in self._aged(by_share, now):
            if fits(aged):
                return aged
            by_share = [queue for queue in by_share if queue.model != aged.request.model]
            if not is_capped(aged):
                heads = (queue.first(1)[0] for queue in by_share)
                return next((head for head in heads if is_floored(head) and fits(head)), None)
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

    def _aged(self, queues: Iterable[ModelQueue], now: float) -> list[Sequence]:
        """Those that have aged, the one that has waited longest first."""
        blocked = [
            (head.blocked_since_s, head.sequence_id, head)
            for queue in queues
            for head in queue.heads()
            if head.blocked_since_s is not None and now - head.blocked_since_s >= self.ageing_s
        ]
        return [head for _, _, head in sorted(blocked)]
