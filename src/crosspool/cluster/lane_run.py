"""LaneRun: one rank's half of one lane's step, as its loop sees it."""

from crosspool.backends.base import HalfStep, LaneLinks, Wait
from crosspool.cluster.channel import WorkClock
from crosspool.core import SampledToken
from crosspool.scheduler.order import Segment
from crosspool.scheduler.step import StepHeader

Outcome = tuple[SampledToken, ...] | None

TELL_EVERY_S = 0.016
"""Tokens of a run's quick steps are told together, so late at most, which is one picture of a screen. Each telling
wakes the engine and a caller, which take a core from the ranks for about as long as half a small model's step."""

STARVING_PRIORITY = -(1 << 31)


class LaneRun:
    """A half step and where it stands: ready to run its next segment, or waiting for flags.

    Times are in seconds on the clock of the loop.
    """

    __slots__ = (
        "_half",
        "_links",
        "_ready_s",
        "_since_s",
        "_ticket",
        "_told_s",
        "_wait",
        "clocks",
        "compute_s",
        "deadline_s",
        "has_waited",
        "header",
        "leads",
        "untold",
        "wait_s",
    )

    def __init__(
        self,
        header: StepHeader,
        half: HalfStep[Outcome],
        links: LaneLinks,
        now_s: float,
        deadline_s: float,
        *,
        leads: bool,
    ) -> None:
        """deadline_s: how long one wait of the half may take. leads: whether this rank's word ends the step."""
        self.header, self.deadline_s, self.leads = header, deadline_s, leads
        self.compute_s = 0.0
        self.wait_s = 0.0
        self.has_waited = False
        self.clocks: tuple[WorkClock, ...] = ()  # of the weights ranks, where they tell their work
        self._half = half
        self._links = links
        self._wait: Wait | None = None  # nothing yet: the first segment needs no peer
        self.untold: list[tuple[SampledToken, ...]] = []  # tokens of a run's steps that have ended, not told yet
        self._told_s = now_s
        self._ticket: int | None = None
        self._since_s = now_s  # when it began to wait, or became ready
        self._ready_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Whether it has waited too long."""
        return self._wait is not None and now_s > self._since_s + self.deadline_s

    def is_ready(self) -> bool:
        """Whether its next segment can run."""
        return self._wait is None or self._wait.satisfied()

    @property
    def waits_for_nobody(self) -> bool:
        """Whether its last segment ended only to tell something, or to let the step before it end."""
        return self._wait is not None and not self._wait.arrivals

    @property
    def rests(self) -> bool:
        """Whether what it waits for is what a device does by itself."""
        return self._wait is not None and self._wait.rest is not None

    def segment(self, now_s: float, next_ticket: int, patience_s: float) -> Segment | None:
        """Its next segment if that is ready. One that became ready only now takes `next_ticket`.

        A segment left lying for `patience_s` outranks every priority, so that no lane starves.
        """
        if not self.becomes_ready(now_s):
            return None
        if self._ticket is None:
            self._ticket = next_ticket
        is_starving = now_s - self._ready_s > patience_s
        return Segment(self.header.lane, STARVING_PRIORITY if is_starving else self.header.priority, self._ticket)

    def becomes_ready(self, now_s: float) -> bool:
        """`is_ready`; a wait that is over is counted."""
        if self._wait is not None:
            if not self._wait.satisfied():
                return False
            self._wait = None
            self.has_waited = True
            self.wait_s += now_s - self._since_s
            self._ready_s = now_s
        return True

    def advance(self) -> None:
        """Run the segment up to its next wait. Raises StopIteration with the half's result at its end."""
        self._ticket = None
        self._wait = next(self._half)
        self.untold += self._wait.told

    def is_to_tell(self, now_s: float) -> bool:
        """Whether there is something to tell, and enough time has passed since the last time (TELL_EVERY_S).

        At once, where a wait tells of several steps, whose tokens were read together. Not where the next segment comes
        at once: it may be the last one, with whose tokens these are told then.
        """
        wait = self._wait
        if wait is None or not wait.arrivals or not self.untold:
            return False
        return len(wait.told) > 1 or now_s - self._told_s >= TELL_EVERY_S

    def take_untold(self, now_s: float) -> tuple[tuple[SampledToken, ...], ...]:
        """Tokens of each of a run's steps that have ended since the last call; they are told now."""
        self._told_s = now_s
        untold, self.untold = tuple(self.untold), []
        return untold

    def nap_s(self, now_s: float) -> float:
        """How late a look at it may come: nothing stands still meanwhile, and it would hardly find anything."""
        wait = self._wait
        return 0.0 if wait is None or wait.rest is None else wait.rest(now_s)

    def waits_since(self, now_s: float) -> None:
        """Start the clock of the wait that the last segment ended in."""
        self._since_s = now_s

    def missing(self) -> tuple[str, ...]:
        """The peers whose flags it waits for."""
        if self._wait is None:
            return ()
        late = [each for each in self._wait.arrivals if not each.arrived(self._wait.epoch)]
        inlets = (*self._links.inlets.items(), *self._links.exchange_inlets.items())
        return tuple(name for name, inlet in inlets if any(inlet is other for other in late))

    def take_ffn_s(self) -> float | None:
        """What the weights rank that worked longest computed since the last call; None where they do not tell."""
        return max((clock.take() for clock in self.clocks), default=None)

    def close(self) -> None:
        """Give the step up where it stands."""
        self._half.close()
