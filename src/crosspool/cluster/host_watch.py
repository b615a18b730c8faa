"""HostWatch: launches the hosts of ranks, looks after them, and ends those that hang; what is lost by that it tells."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from crosspool.cluster import messages
from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Board
from crosspool.cluster.host import Host
from crosspool.cluster.messages import ToRank
from crosspool.cluster.supervisor import RankState, Supervisor

STOP_TIMEOUT_S = 3.0
HANG_FACTOR = 1.5
"""A host that owes work may be silent for this many step deadlines."""
ACCUSED_FACTOR = 0.8
"""A rank that another one waited for in vain is taken for hung if it was silent for this part of the deadline."""


class Loss(NamedTuple):
    """A host is gone, and its ranks with it. will_restart: it will be launched again."""

    ranks: Sequence[str]
    reason: str
    will_restart: bool


class HostWatch:
    """Hosts have numbers, in the order given. supervisor: where each of their ranks stands."""

    def __init__(self, hosts: Sequence[Host], board: Board, config: ClusterConfig, clock: Callable[[], float]) -> None:
        self._hosts, self._board, self._clock = hosts, board, clock
        self._accused_s = ACCUSED_FACTOR * config.step_deadline_s
        self._endings: dict[int, str] = {}  # why a host ends, as it told itself
        self.host_of = {rank: number for number, host in enumerate(hosts) for rank in host.ranks}
        self.supervisor = Supervisor(
            [host.ranks for host in hosts],
            start_timeout_s=config.start_timeout_s,
            hang_s=HANG_FACTOR * config.step_deadline_s,
            max_failed_starts=config.max_failed_starts,
        )

    def send(self, rank: str, message: ToRank) -> None:
        """A rank that is away hears nothing."""
        if self.supervisor.is_up(rank):
            self._hosts[self.host_of[rank]].send(rank, message)

    def launch(self, number: int, now_s: float) -> None:
        """Raises OSError where the machine has nothing left to start it with."""
        self.supervisor.launched(number, now_s)
        self._hosts[number].launch()

    def said_why(self, rank: str, reason: str) -> None:
        """The rank's host is about to end, for this reason."""
        self._endings[self.host_of[rank]] = reason

    def accused(self, rank: str) -> str | None:
        """Another rank waited for this one in vain: why it is taken for hung; None: it is busy with others' work."""
        number, now_s = self.host_of[rank], self._clock()
        self.supervisor.overdue(number, now_s, self._board.beat(number), owes_work=True)
        silent_s = self.supervisor.silent_s(number, now_s)
        is_hung = self.supervisor.is_up(rank) and silent_s >= self._accused_s
        return f"gave no sign of life for {silent_s:.1f} s" if is_hung else None

    def hung(self, now_s: float, owing: Collection[int]) -> Iterator[tuple[int, str]]:
        """Hosts that hang, each with the reason. owing: those that have work; they are woken where they are silent."""
        for number, host in enumerate(self._hosts):
            if not self.supervisor.is_up(host.ranks[0]):
                continue
            reason = self.supervisor.overdue(number, now_s, self._board.beat(number), number in owing)
            if reason is not None:
                yield number, reason
            elif number in owing and self.supervisor.silent_s(number, now_s) > 0:
                host.nudge()  # it may have done its part of a step that others still work on, and sleep

    def end(self, number: int, reason: str | None, *, was_launched: bool) -> Loss | None:
        """A host has ended by itself (no reason), hangs and is ended here, or could not be launched.

        None: a thread that hangs cannot be ended; its steps end by their deadlines.
        """
        host = self._hosts[number]
        if reason is not None:
            host.show_stacks()
        can_restart = host.kill()
        if reason is not None and not can_restart:
            return None
        reason = self._endings.pop(number, None) or reason or host.last_words()
        will_restart = self.supervisor.has_ended(number, self._clock(), was_launched=was_launched) and can_restart
        if not will_restart:
            self.supervisor.give_up(number)
        return Loss(host.ranks, reason, will_restart)

    def stop(self) -> bool:
        """Stop every host; False if a thread lives on.

        A process that is still starting hears nothing for seconds and holds nothing yet: it is killed.
        """
        for host in self._hosts:
            if self.supervisor.state(host.ranks[0]) is RankState.STARTING and host.pid is not None:
                host.kill()
            else:
                self.send(host.ranks[0], messages.Stop())
        until_s = time.monotonic() + STOP_TIMEOUT_S
        return all([host.end(until_s) for host in self._hosts])
