"""Pace: how long the steps of a lane's runs take, learned from what its host found whenever it looked. Pure."""

from crosspool.units import ceil_div

TELL_S = 0.012
"""How much of a run is read and told at once: so late a token may come."""

EARLY = 0.01
"""Part of a run's usual time by which the first look for its end comes early."""

FASTER = 0.95
"""Where the first look finds that the run is over already: how much sooner the next one's comes."""


class Pace:
    """Times are seconds on the caller's clock. step_s: 0 as long as nothing is known."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._begun_s = 0.0

    def begin(self, now_s: float) -> None:
        """A run's first step begins."""
        self._begun_s = now_s

    def look_s(self, num_ended: int) -> float:
        """When to look first for the end of so many steps of the run: just before it is usual."""
        return self._begun_s + (1 - EARLY) * num_ended * self.step_s

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

    def ends(self, now_s: float, num_steps: int, nap_s: float) -> None:
        """The run is over, for no longer than `nap_s` unless this was the first look."""
        elapsed_s = now_s - self._begun_s
        was_awaited = now_s > self.look_s(num_steps) + nap_s
        self.step_s = elapsed_s / num_steps if was_awaited else min(FASTER * self.step_s, elapsed_s / num_steps)
