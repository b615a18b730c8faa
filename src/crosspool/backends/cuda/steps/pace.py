"""Pace: how long the steps of a lane's runs take, learned from what its host found whenever it looked.

StepPace is the same of single steps: how long these take at the least.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from crosspool.units import ceil_div

TELL_S = 0.02
"""How much of a run is read and told at once: so late a token may come."""

EARLY, LATE = 0.01, 0.03
"""Part of the usual time by which the first look comes early where the device is about to stand still, and late where
it goes on: there one look is to do."""

NAP_S, URGENT_NAP_S = 5e-4, 5e-5
"""How late tokens may be read while the device goes on, and at the end of a run, when it is to get its next one."""

FASTER, SLOWER = 0.98, 1.1
"""Where the first look finds that the run is over already: how much sooner the next one's comes. And how much later at
most, unless they take FAR_OFF times as long: a run that was held up once says little of the next."""

FAR_OFF = 2.0
"""So many times what was thought, and more: not a run that was held up, but a pace that was wrong."""

EASY_FASTER = 0.9995
"""FASTER where the device goes on: a look for nothing costs more there than a late one."""

STEADY_STEPS = 64
"""Over how many steps at most a small error is spread: what a look tells of them is no finer than a nap."""


class Pace:
    """Times are seconds on `clock`. step_s: 0 as long as nothing is known.

    It goes into a wait before its inlets, as one that has always arrived, and so learns of every look. Of two things it
    is certain: a step that a look finds ended had ended by then, and one that it does not find had not when it began.
    What was expected is changed no more than these ask for, so a host whose rests are long learns nothing wrong.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step_s = 0.0
        self._clock = clock
        self._begun_s = self._look_s = 0.0
        self._looked_s = self._missed_s = -math.inf  # the last look; the last one that did not find what it was for
        self._num_awaited = self._num_later = 0
        self._is_urgent: Callable[[], bool] = lambda: False
        self._was_urgent = False
        self._num_looks = 0  # since it was time for the first one
        self._num_before = 0  # steps between what was last known for certain and the run's beginning
        self._was_seen = True  # when the run began

    def arrived(self, epoch: int) -> bool:
        """Somebody looks."""
        self._missed_s, self._looked_s = self._looked_s, self._clock()
        self._num_looks += self._looked_s >= self._look_s
        return True

    def begin(self, now_s: float, follows_s: float | None = None, *, is_ahead: bool = False) -> None:
        """A run's first step begins: now or, where it follows another run on the device, when that is thought to end.

        follows_s: what `ends` has said of that one. is_ahead: the run was handed over before it could begin; where
        nothing is known of what it follows, the device may be anywhere in it.
        """
        self._missed_s = self._looked_s = -math.inf
        if follows_s is None:
            self._begun_s, self._num_before = now_s, 0
        else:
            self._begun_s = min(now_s, follows_s)
        self._was_seen = follows_s is not None or not is_ahead

    def look_for(self, num_ended: int, is_urgent: Callable[[], bool], num_later: int = 0) -> None:
        """From now on the end of so many steps of the run is looked for; is_urgent: the device then stands still.

        num_later: steps of the next run that may end too before the first look, unless that is urgent.
        """
        self._num_awaited, self._num_later, self._is_urgent = num_ended, num_later, is_urgent
        self._num_looks = 0
        self._missed_s = self._looked_s = -math.inf
        self._set_look()

    def nap_s(self, now_s: float) -> float:
        """How long nobody need look (`backends.base.Wait`)."""
        self._set_look()
        return max(self._look_s - now_s, URGENT_NAP_S if self._was_urgent else NAP_S)

    def _set_look(self) -> None:
        """Until when to rest: the step behind may have been handed over since, and then nothing is urgent."""
        self._was_urgent = self._is_urgent()
        part, num = (1 - EARLY, 0) if self._was_urgent else (1 + LATE, self._num_later)
        self._look_s = self._begun_s + part * (self._num_awaited + num) * self.step_s

    def num_at_once(self, num_left: int) -> int:
        """How many of the steps left to read together: parts as equal as can be, none longer than TELL_S."""
        most = max(1, int(TELL_S / self.step_s)) if self.step_s else 1
        return ceil_div(num_left, ceil_div(num_left, most))

    def goes_on(self, now_s: float, num_ended: int) -> None:
        """So many steps have ended by now, and the run goes on."""
        self._correct(now_s, num_ended)

    def ends(self, now_s: float, num_steps: int) -> float:
        """The run is over, by now. Returns when that is thought to have been."""
        self._correct(now_s, num_steps)
        if self._num_looks <= 1:
            self.step_s *= FASTER if self._was_urgent else EASY_FASTER
        ended_s = self._begun_s + num_steps * self.step_s
        self._num_before += num_steps
        return min(now_s, ended_s)

    def _correct(self, now_s: float, num_ended: int) -> None:
        """By now so many steps have ended; those looked for had not at the look before the last."""
        sooner_s = self._begun_s + num_ended * self.step_s - now_s
        if sooner_s > 0 and self._was_seen:
            self._move(-sooner_s, num_ended)
        elif sooner_s > 0:
            self._begun_s -= sooner_s
        elif self._missed_s > self._begun_s:
            later_s = self._missed_s - self._begun_s - self._num_awaited * self.step_s
            if later_s > 0:
                self._move(later_s, self._num_awaited)

    def _move(self, seconds: float, num: int) -> None:
        """The run's step `num` ended so much later than was thought: steps are slower or, in small, began later."""
        is_small = 2 * abs(seconds) < self.step_s
        since = max(1, min(self._num_before + num, STEADY_STEPS)) if is_small else num
        before_s, self.step_s = self.step_s, self.step_s + seconds / since
        if before_s:
            self.step_s = min(self.step_s, max(SLOWER * before_s, self.step_s / FAR_OFF))
        self._begun_s += seconds - num * (self.step_s - before_s)
        self._num_before = -num


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
