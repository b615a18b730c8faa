"""Pace: how long the steps of a lane's runs take, learned from what its host found whenever it looked."""

import time
from collections.abc import Callable
from typing import Any

from crosspool.units import ceil_div

TELL_S = 0.016
"""How much of a run is read and told at once: so late a token may come."""

EARLY, LATE = 0.01, 0.03
"""Part of the usual time by which the first look comes early where the device is about to stand still, and late where
it goes on: there one look is to do."""

NAP_S, URGENT_NAP_S = 5e-4, 5e-5
"""How late tokens may be read while the device goes on, and at the end of a run, when it is to get its next one."""

FASTER, SLOWER = 0.98, 1.1
"""Where the first look finds that the run is over already: how much sooner the next one's comes. And how much later at
most, however long a run took: a host that was kept from its core must not take that for steps."""

EASY_FASTER = 0.995
"""FASTER where the device goes on: a look for nothing costs more there than a late one."""


class Pace:
    """Times are seconds on `clock`. step_s: 0 as long as nothing is known.

    It goes into a wait before its inlets, as one that has always arrived, and so learns of every look.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step_s = 0.0
        self._clock = clock
        self._begun_s = self._look_s = 0.0
        self._num_awaited = 0
        self._is_urgent: Callable[[], bool] = lambda: False
        self._was_urgent = False
        self._num_looks = 0  # since it was time for the first one

    def arrived(self, epoch: int) -> bool:
        """Somebody looks."""
        self._num_looks += self._clock() >= self._look_s
        return True

    def take(self, layer: int, num_tokens: int, width: int) -> Any:
        raise TypeError("it carries no rows")

    def begin(self, now_s: float) -> None:
        """A run's first step begins."""
        self._begun_s = now_s

    def look_for(self, num_ended: int, is_urgent: Callable[[], bool]) -> None:
        """From now on the end of so many steps of the run is looked for; is_urgent: the device then stands still."""
        self._num_awaited, self._is_urgent = num_ended, is_urgent
        self._num_looks = 0
        self._set_look()

    def nap_s(self, now_s: float) -> float:
        """How long nobody need look (`backends.base.Wait`)."""
        self._set_look()
        return max(self._look_s - now_s, URGENT_NAP_S if self._was_urgent else NAP_S)

    def _set_look(self) -> None:
        """Until when to rest: the step behind may have been handed over since, and then nothing is urgent."""
        self._was_urgent = self._is_urgent()
        part = 1 - EARLY if self._was_urgent else 1 + LATE
        self._look_s = self._begun_s + part * self._num_awaited * self.step_s

    def num_at_once(self, num_left: int) -> int:
        """How many of the steps left to read together: parts as equal as can be, none longer than TELL_S."""
        most = max(1, int(TELL_S / self.step_s)) if self.step_s else 1
        return ceil_div(num_left, ceil_div(num_left, most))

    def goes_on(self, now_s: float, num_ended: int) -> None:
        """So many steps have ended, and the next one has not."""
        elapsed_s = now_s - self._begun_s
        self.step_s = max(self.step_s, elapsed_s / (num_ended + 1))
        if num_ended:
            self.step_s = min(self.step_s, elapsed_s / num_ended)

    def ends(self, now_s: float, num_steps: int) -> None:
        """The run is over: since the last look, or for a longer time if this was the first one."""
        elapsed_s = now_s - self._begun_s
        longest_s = elapsed_s / num_steps
        if self._num_looks > 1:
            self.step_s = min(SLOWER * self.step_s, longest_s) if self.step_s else longest_s
        else:
            self.step_s = min((FASTER if self._was_urgent else EASY_FASTER) * self.step_s, longest_s)
