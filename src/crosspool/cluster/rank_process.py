"""The child process of one host: `python -m crosspool.cluster.rank_process CONTROL_FD RANK...`."""

import ctypes
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from crosspool.cluster.control import ControlSocket
from crosspool.cluster.doorbell import Board
from crosspool.cluster.host import make_host_loop
from crosspool.cluster.loading import LoadThreads
from crosspool.cluster.messages import Boot, FromRank, ToRank

_PR_SET_PDEATHSIG = 1


class SocketInbox:
    """Messages to and from a host that is a process (`host_loop.Inbox`)."""

    def __init__(self, control: ControlSocket[ToRank, FromRank]) -> None:
        self.fds = (control.fd,)
        self._control = control
        self._early: list[tuple[str, ToRank]] = []  # came along with the first message

    def boot(self) -> Boot:
        """Wait for the first message."""
        poll = select.poll()
        poll.register(self._control.fd, select.POLLIN)
        while not (messages := self._control.receive()):
            poll.poll()
        (_, boot), *self._early = messages
        assert isinstance(boot, Boot), f"the first message is {type(boot).__name__}, not Boot"
        return boot

    def receive(self) -> Sequence[tuple[str, ToRank]]:
        if self._early:
            messages, self._early = self._early, []
            return messages
        return self._control.receive()

    def has_messages(self) -> bool:
        return bool(self._early)

    def answer(self, rank: str) -> Callable[[FromRank], None]:
        def emit(message: FromRank) -> None:
            self._control.send((rank, message))

        return emit


def main(control_fd: int) -> None:
    """Boot, then run the host's loop until the parent says stop, or is gone."""
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group: the parent decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        inbox = SocketInbox(ControlSocket(socket.socket(fileno=control_fd)))
        boot = inbox.boot()
        if os.getppid() != boot.parent_pid:
            return  # it died before the death signal was set
        board = Board(boot.board)
        boot.board.close()
        spin_us = boot.config.spin_us
        make_host_loop(boot.config, boot.host, boot.doorbells, board, inbox, LoadThreads(), spin_us).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, and so is every use for this process


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent is gone: it reaches even a stopped process. Elsewhere the socket tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a load that is under way in a thread must not hold up the end
