"""HostPost: how the parent of the ranks waits for what hosts say, without spinning."""

import select
from collections.abc import Sequence

from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.fence import Fence
from crosspool.cluster.host import Host

MAX_WAIT_S = 86_400.0


class HostPost:
    """A host tells of answers on the board and rings the parent's doorbell.

    Its descriptor tells of its end, and of room to send in.
    """

    def __init__(self, hosts: Sequence[Host], doorbell: Doorbell, board: Board) -> None:
        self._hosts = hosts
        self._doorbell = doorbell
        self._board = board
        self._answers = [0] * len(hosts)  # of each host, those that have been read
        self._fence = Fence()
        self._poll = select.poll()
        self._polled: dict[int, int] = {}  # descriptors in `_poll`, with what they are polled for
        self._poll_fds({doorbell.read_fd: select.POLLIN})

    def wait(self, seconds: float) -> set[int]:
        """Numbers of hosts that may have said something, waiting so long for the first."""
        fds = {self._doorbell.read_fd: select.POLLIN}
        for host in self._hosts:
            if (fd := host.fd()) is not None:
                fds[fd] = select.POLLOUT if host.flush() else 0
        if fds != self._polled:
            self._poll_fds(fds)
        parent = len(self._hosts)
        if seconds > 0:
            self._board.set_asleep(parent, True)
            self._fence.full()  # see `doorbell.ringer`: marked first, looked at last
        found = self._answering()
        told = self._poll.poll(0 if found else 1000 * min(seconds, MAX_WAIT_S))
        if seconds > 0:
            self._board.set_asleep(parent, False)
        if told:
            fds_told = {fd for fd, _ in told}
            if self._doorbell.read_fd in fds_told:
                self._doorbell.drain()
            found |= self._answering() | {number for number, host in enumerate(self._hosts) if host.fd() in fds_told}
        return found | {number for number, host in enumerate(self._hosts) if host.fd() is None}

    def will_read(self, number: int) -> None:
        """A host's answers so far are about to be read."""
        self._answers[number] = self._board.answers(number)

    def _answering(self) -> set[int]:
        """Hosts that tell on the board of answers which have not been read."""
        return {number for number, seen in enumerate(self._answers) if self._board.answers(number) != seen}

    def _poll_fds(self, fds: dict[int, int]) -> None:
        for fd in self._polled.keys() - fds.keys():
            self._poll.unregister(fd)
        for fd, events in fds.items():
            self._poll.register(fd, events)
        self._polled = fds
