"""Supervisor: which state every rank is in, and when its host is started, given up, or taken for hung.

A pure state machine: time is an argument, in seconds on any monotonic clock; starting and killing are the caller's.

    starting -> loading -> ready          lost -> starting ...
        any of them ----------> lost      lost -> failed (too many failed starts in a row)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

BACKOFF_S = 0.2
"""Wait before the start that follows a failed one; it doubles with each further failure."""
MAX_BACKOFF_S = 10.0
LOOKS = 32
"""Looks at a host that owes work before it counts as hung."""


class RankState(StrEnum):
    """Where a rank stands."""

    STARTING = "starting"  # its host was launched and has not spoken
    LOADING = "loading"  # takes messages, loads the models placed on it
    READY = "ready"
    LOST = "lost"  # its host is gone and will be started again
    FAILED = "failed"  # its host did not come back


@dataclass(slots=True)
class _Host:
    ranks: Sequence[str]
    launched_s: float = 0.0
    lost_s: float | None = None  # since when it is, or was last, away
    restart_s: float = 0.0
    num_failed_starts: int = 0
    has_served: bool = False
    beat: int = -1
    beat_s: float = 0.0  # when the beat was last seen to move, or nothing was owed
    looked_s: float = 0.0


class Supervisor:
    """States of the ranks of a cluster; hosts are numbered in the order given."""

    def __init__(
        self, hosts: Sequence[Sequence[str]], *, start_timeout_s: float, hang_s: float, max_failed_starts: int
    ) -> None:
        self._hosts = [_Host(tuple(ranks)) for ranks in hosts]
        self._host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self._states = dict.fromkeys(self._host_of, RankState.LOST)
        self._start_timeout_s = start_timeout_s
        self._hang_s = hang_s
        self._max_failed_starts = max_failed_starts

    def state(self, rank: str) -> RankState:
        return self._states[rank]

    def is_up(self, rank: str) -> bool:
        """Whether its host was launched and is not lost, so that messages reach it."""
        return self._states[rank] not in (RankState.LOST, RankState.FAILED)

    def launched(self, host: int, now_s: float) -> None:
        """The host's thread or process was started."""
        entry = self._hosts[host]
        entry.launched_s = entry.beat_s = entry.looked_s = now_s
        entry.beat = -1
        self._set(host, RankState.STARTING)

    def said_hello(self, rank: str) -> None:
        """The rank has spoken for the first time since its host's launch."""
        self._states[rank] = RankState.LOADING

    def has_loaded(self, rank: str, now_s: float) -> float:
        """The rank holds all its models; gives the seconds since it was lost, or first launched."""
        self._states[rank] = RankState.READY
        host = self._hosts[self._host_of[rank]]
        if all(self._states[other] is RankState.READY for other in host.ranks):
            host.num_failed_starts, host.has_served = 0, True
        return now_s - (host.launched_s if host.lost_s is None else host.lost_s)

    def has_ended(self, host: int, now_s: float, *, was_launched: bool = True) -> bool:
        """The host's thread or process is gone. True if it will be started again, False if it is given up.

        Without `was_launched` this machine had nothing left to start it with: one that has served is tried for ever.
        """
        entry = self._hosts[host]
        was_ready = all(self._states[rank] is RankState.READY for rank in entry.ranks)
        entry.num_failed_starts = 0 if was_ready else entry.num_failed_starts + 1
        entry.lost_s = now_s
        if entry.num_failed_starts >= self._max_failed_starts and (was_launched or not entry.has_served):
            self._set(host, RankState.FAILED)
            return False
        entry.restart_s = now_s + backoff_s(entry.num_failed_starts)
        self._set(host, RankState.LOST)
        return True

    def give_up(self, host: int) -> None:
        """The host cannot be started again."""
        self._set(host, RankState.FAILED)

    def due(self, now_s: float) -> list[int]:
        """Hosts to launch now."""
        return [
            number
            for number, host in enumerate(self._hosts)
            if self._states[host.ranks[0]] is RankState.LOST and now_s >= host.restart_s
        ]

    def overdue(self, host: int, now_s: float, beat: int, owes_work: bool) -> str | None:
        """Why the host counts as hung, or None. `beat` is the newest it showed.

        Only time in which the caller looked is counted: after a pause of the caller the count begins anew.
        """
        entry = self._hosts[host]
        has_paused = now_s - entry.looked_s > self._hang_s / 2
        entry.looked_s = now_s
        is_starting = any(self._states[rank] is RankState.STARTING for rank in entry.ranks)
        if beat != entry.beat or not owes_work or has_paused or is_starting:
            entry.beat, entry.beat_s = beat, now_s
        if is_starting:
            if now_s - entry.launched_s > self._start_timeout_s:
                return f"did not start within {self._start_timeout_s:g} s"
            return None
        if now_s - entry.beat_s > self._hang_s:
            return f"gave no sign of life for {now_s - entry.beat_s:.1f} s"
        return None

    def silent_s(self, host: int, now_s: float) -> float:
        """Seconds in which the host owed work and did not beat."""
        return now_s - self._hosts[host].beat_s

    def next_look_s(self, now_s: float, owing: Sequence[int]) -> float | None:
        """When to look again: for a restart that falls due, or at hosts that start or owe work. None: no need."""
        moments = []
        for number, host in enumerate(self._hosts):
            state = self._states[host.ranks[0]]
            if state is RankState.LOST:
                moments.append(host.restart_s)
            elif number in owing or state is RankState.STARTING:
                moments.append(now_s + self._hang_s / LOOKS)
        return min(moments, default=None)

    def _set(self, host: int, state: RankState) -> None:
        for rank in self._hosts[host].ranks:
            self._states[rank] = state


def backoff_s(num_failed_starts: int) -> float:
    """Seconds to wait after so many failed starts in a row."""
    return min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(num_failed_starts - 1, 20)) if num_failed_starts else 0.0
