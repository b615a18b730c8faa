"""AheadOfNeed: which free pages each model should find mapped already, and whose mapped pages are taken back.

Pure: time and demand are arguments. It moves frames between shelves of the pool (`pool.py`) and says what to tell the
KV worker, whose mapper does the rest in a thread of its own (`backing/`). Every sequence of a model may need a page at
its next step, so a model's low watermark is the number of its live sequences, and its shelf is filled up to twice that.
A model without live sequences keeps what it has until it has been idle for a while, or others need the frames.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crosspool.kv_pool.pool import KVPool, Page
from crosspool.units import ceil_div

IDLE_S = 5.0
"""How long a model without live sequences keeps its mapped pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingHint:
    """What a KV worker is told about one model: pages that it will get, and pages that it will not get again soon."""

    model: str
    expected: tuple[Page, ...] = ()
    given_back: tuple[Page, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryHint:
    """What a KV worker is told about frames: those whose memory goes back to the driver, those that get some again."""

    withdrawn: tuple[int, ...] = ()
    restored: tuple[int, ...] = ()


Hint = MappingHint | MemoryHint


class AheadOfNeed:
    """The watermarks of one pool, and the frames that its limits leave unused."""

    def __init__(self, pool: KVPool, idle_s: float = IDLE_S) -> None:
        self._pool = pool
        self._taken_apart: list[tuple[str, Page]] = []
        pool.taken_apart = self._taken_apart
        self._idle_s = idle_s
        self._idle_since_s: dict[str, float] = {}
        self._num_unused = 0
        self._untold: list[int] = []  # withdrawn frames that a worker which started anew has memory for
        self._restored: list[int] = []

    def leave_unused(self, num_frames: int, *, is_settling: bool) -> None:
        """As many frames are beyond the limits from now on; those that are wanted again are free at once.

        is_settling: live sequences were promised more than the limits allow, so all memory is needed until they end.
        """
        self._num_unused = num_frames
        kept = 0 if is_settling else num_frames
        self._restored += self._pool.restore(max(0, self._pool.num_withdrawn - kept))

    def started_anew(self) -> None:
        """The worker has memory for every frame."""
        self._untold = list(self._pool.withdrawn)
        self._restored.clear()

    def hints(self, demand: Mapping[str, int], now: float, *, may_withdraw: bool = True) -> list[Hint]:
        """Fill shelves and take back. demand: by model, how many live sequences it has; every model of the pool.

        may_withdraw: whether all that live sequences were promised lies within the limits.
        """
        found: list[Hint] = list(self._memory(may_withdraw))
        given_back = [MappingHint(model=model, given_back=(page,)) for model, page in self._taken_apart]
        self._taken_apart.clear()
        given_back += self._aged(demand, now)
        expected: list[MappingHint] = []
        for model, num_live in demand.items():
            short = 2 * num_live - self._pool.num_shelved(model)
            if short > num_live:  # below the low watermark
                given_back += self._make_loose(model, short)
                if made := self._pool.stock(model, short):
                    expected.append(MappingHint(model=model, expected=made))
        return [*found, *given_back, *expected]

    def _memory(self, may_withdraw: bool) -> list[MemoryHint]:
        """What the limits leave unused goes; first, what is back in use comes."""
        restored, untold = self._restored, self._untold
        self._restored, self._untold = [], []
        if may_withdraw:
            untold += self._pool.withdraw(max(0, self._num_unused - self._pool.num_withdrawn))
        if not restored and not untold:
            return []
        return [MemoryHint(withdrawn=tuple(untold), restored=tuple(restored))]

    def next_moment(self) -> float | None:
        """When a model has been idle for long enough."""
        shelved = (since for model, since in self._idle_since_s.items() if self._pool.num_shelved(model))
        first = min(shelved, default=None)
        return None if first is None else first + self._idle_s

    def _aged(self, demand: Mapping[str, int], now: float) -> list[MappingHint]:
        """Shelves of models that have been idle for too long, emptied."""
        for model, num_live in demand.items():
            if num_live:
                self._idle_since_s.pop(model, None)
            else:
                self._idle_since_s.setdefault(model, now)
        for model in self._idle_since_s.keys() - demand.keys():
            del self._idle_since_s[model]
        hints = []
        for model, since_s in self._idle_since_s.items():
            if now - since_s >= self._idle_s and (pages := self._pool.unshelve(model)):
                hints.append(MappingHint(model=model, given_back=pages))
        return hints

    def _make_loose(self, model: str, num_pages: int) -> list[MappingHint]:
        """Take pages from models without live sequences, the longest idle first, until `model` can be served."""
        hints = []
        width = self._pool.frames_per_page(model)
        for other in sorted(self._idle_since_s, key=self._idle_since_s.__getitem__):
            lacking = num_pages * width - self._pool.num_loose
            if lacking <= 0:
                break
            if pages := self._pool.unshelve(other, ceil_div(lacking, self._pool.frames_per_page(other))):
                hints.append(MappingHint(model=other, given_back=pages))
        return hints
