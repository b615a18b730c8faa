"""StepPace: how long a lane's single steps take at the least, so that its host may look away for most of that."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

NUM_KEPT = 8
"""Steps of which the shortest tells how long to rest; until so many have been seen, the host looks all the time."""

RESTED = 0.9
"""Part of the shortest one."""

SHORTEST_NAP_S = 2e-4
"""Less is not worth a call of the system."""

EASY_NAP_S = 2e-4
"""How late a step's end may be seen that has another one behind it on the device."""


class StepPace:
    """Times are seconds on `clock`. A step's end is seen at once, unless it comes sooner than that of any of the last.

    It goes into a wait before its inlets, as one that has always arrived, and so learns of every look.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: deque[float] = deque(maxlen=NUM_KEPT)
        self._begun_s = self._look_s = 0.0
        self._num_looks = 0  # since it was time for the first one
        self._is_followed: Callable[[], bool] = lambda: False

    def arrived(self, epoch: int) -> bool:
        """Somebody looks."""
        self._num_looks += self._clock() >= self._look_s
        return True

    def take(self, layer: int, num_tokens: int, width: int) -> Any:
        raise TypeError("it carries no rows")

    def begin(self, now_s: float, is_followed: Callable[[], bool]) -> None:
        """A step begins. is_followed: whether the device has the next one, so that it does not stand still after it."""
        self._begun_s, self._is_followed, self._num_looks = now_s, is_followed, 0
        self._look_s = now_s + RESTED * min(self._kept) if len(self._kept) == NUM_KEPT else now_s

    def nap_s(self, now_s: float) -> float:
        """How long nobody need look (`backends.base.Wait`); 0: look all the time."""
        left_s = self._look_s - now_s
        if self._is_followed():
            return max(left_s, EASY_NAP_S)
        return left_s if left_s >= SHORTEST_NAP_S else 0.0

    def ends(self, now_s: float) -> None:
        """The step has ended. Where the first look finds that, it may have long ago, and nothing is known any more."""
        if self._num_looks <= 1 and len(self._kept) == NUM_KEPT and not self._is_followed():
            self._kept.clear()
            return
        self._kept.append(now_s - self._begun_s)
