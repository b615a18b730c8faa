"""HostLoop: turns the loops of one or more ranks, in a thread or process of its own, or in its caller's."""

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.fence import Fence
from crosspool.cluster.messages import FromRank, Stop, ToRank
from crosspool.cluster.rank_loop import RankLoop

LOOK_TURNS = 256
"""After so many turns of work on end descriptors are asked too: a parent that is gone posts nothing."""

BUSY_NAP_S = 0.05
"""Longest sleep while something is in flight, so that the host's beat goes on and no lost ring costs more."""
LONGEST_NAP_S = 0.1
"""The same while all that is in flight goes on by itself, on devices: a look would hardly find anything."""
BLIND_NAP_S = 0.005
"""The same where descriptors cannot tell of messages meanwhile."""

LONG_NAP_S = 5e-3
"""In shorter ones every message is taken at once: beside what the rank waits for, its turn would not be short."""

SELECT_FDS = 1024
"""`select` knows descriptors below this."""

_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Lets another process of this core run: a look around must not keep the very peer from working that it waits for."""


class Inbox(Protocol):
    """Where control messages arrive."""

    @property
    def fds(self) -> Sequence[int]:
        """Descriptors that become readable with a message, beside the doorbell."""
        ...

    def receive(self) -> Sequence[tuple[str, ToRank]]:
        """Messages that have come, with the rank they are for; never blocks. Raises EOFError if the parent is gone."""
        ...

    def has_messages(self) -> bool:
        """Whether some have come, as far as that can be told without asking the system."""
        ...

    def answer(self, rank: str) -> Callable[[FromRank], None]:
        """What sends a rank's messages to the parent."""
        ...


class HostLoop:
    """Turns the loops of its ranks. Idle, it blocks in one system call on its doorbell and its inbox."""

    def __init__(
        self, loops: Sequence[RankLoop], inbox: Inbox, doorbell: Doorbell, board: Board, host: int, spin_us: float
    ) -> None:
        self._loops = {loop.name: loop for loop in loops}
        self._only = loops[0] if len(loops) == 1 else None
        self._inbox = inbox
        self._doorbell = doorbell
        self._board = board
        self._host = host
        self._spin_s = spin_us * 1e-6
        self._fence = Fence()
        self._beat = board.beat(host)
        self._has_slept = True
        self._poll = select.poll()
        self._fds = sorted((doorbell.read_fd, *inbox.fds))
        for fd in self._fds:
            self._poll.register(fd, select.POLLIN)

    def run(self) -> None:
        """Work until a `Stop`."""
        self.begin()
        while self.turn():
            pass
        self.close()

    def begin(self) -> None:
        self._board.set_asleep(self._host, False)
        for loop in self._loops.values():
            loop.hello()

    def close(self) -> None:
        for loop in self._loops.values():
            loop.close()

    def turn(self) -> bool:
        """Take messages, run at most one segment of each rank, and rest if nothing is to do. False after a `Stop`."""
        if not self._take_messages():
            return False
        if not self._advance() or (self._only is not None and self._only.rests):
            self._rest()
        return True

    def work(self) -> bool:
        """The same for a caller that rests itself: whether a segment was run."""
        self._has_slept = True  # the caller did who knows what
        return self._take_messages() and self._advance()

    def _take_messages(self) -> bool:
        """False after a `Stop`."""
        if self._has_slept or self._inbox.has_messages() or self._beat % LOOK_TURNS == 0:
            self._has_slept = False
            for rank, message in self._inbox.receive():
                if isinstance(message, Stop):
                    return False
                self._loops[rank].handle(message)
        return True

    def _advance(self) -> bool:
        self._beat += 1
        self._board.set_beat(self._host, self._beat)
        has_worked = False
        for loop in self._loops.values():
            has_worked |= loop.advance()
        return has_worked

    def _has_work(self) -> bool:
        return self._inbox.has_messages() or any(loop.has_work() for loop in self._loops.values())

    def _rest(self) -> None:
        """Sleep until a ring, a message or a deadline; first look for a short time if a step is in flight."""
        is_busy = any(loop.is_busy for loop in self._loops.values())
        nap_s = min(loop.nap_s() for loop in self._loops.values())
        if is_busy and nap_s > 0:  # devices go on by themselves: nobody rings, and nothing stands still
            self._nap(min(nap_s, LONGEST_NAP_S))
            return
        if is_busy and self._spin_s > 0 and self._look_around():
            return
        self._board.set_asleep(self._host, True)
        self._fence.full()  # see `doorbell.ringer`: marked first, looked at last
        readable = [] if self._has_work() else self._poll.poll(1000 * BUSY_NAP_S if is_busy else None)
        self._board.set_asleep(self._host, False)
        self._has_slept = True
        if any(fd == self._doorbell.read_fd for fd, _ in readable):
            self._doorbell.drain()

    def _nap(self, seconds: float) -> None:
        """Rest for so long, or until a message comes; in a long nap one that may wait for the next look does."""
        self._board.set_napping(self._host)
        self._fence.full()  # see `doorbell.ringer`
        readable: Sequence[int] = ()
        if not self._inbox.has_messages():
            readable = self._doze(seconds)
        self._board.set_asleep(self._host, False)
        self._has_slept |= bool(readable)
        if self._doorbell.read_fd in readable:
            self._doorbell.drain()

    def _doze(self, seconds: float) -> Sequence[int]:
        """The descriptors that have ended it."""
        if self._fds[-1] >= SELECT_FDS:
            time.sleep(min(seconds, BLIND_NAP_S))
            return ()
        fds = self._fds if seconds < LONG_NAP_S else (self._doorbell.read_fd,)
        readable, _, _ = select.select(fds, (), (), seconds)  # `poll` knows whole milliseconds only
        return readable

    def _look_around(self) -> bool:
        """Whether work comes within the time of a spin. What there is to look at stays the same meanwhile."""
        looks = [self._inbox.has_messages]
        for loop in self._loops.values():
            looks += loop.looks()
        until_s = time.perf_counter() + self._spin_s
        while time.perf_counter() < until_s:
            for look in looks:
                if look():
                    return True
            _yield_core()
        return False
