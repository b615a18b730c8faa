"""The child process of one host: `python -m crosspool.cluster.rank_process CONTROL_FD RANK...`."""

import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

from crosspool.cluster.control import ControlSocket
from crosspool.cluster.doorbell import Board, ringer
from crosspool.cluster.host import make_host_loop
from crosspool.cluster.loading import LoadThreads, Start, one_line
from crosspool.cluster.messages import Boot, Ending, FromRank, ToRank
from crosspool.cluster.process_host import GROUP_SIGNALS, STACKS_SIGNAL
from crosspool.cluster.rank_log import set_up_rank_log

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class SocketInbox:
    """Messages to and from a host that is a process (`host_loop.Inbox`)."""

    def __init__(self, control: ControlSocket[ToRank, FromRank]) -> None:
        self.fds = (control.fd,)
        self._control = control
        self._early: list[tuple[str, ToRank]] = []  # came along with the first message
        self._post: Callable[[], int] = lambda: 0
        self._seen_post = 0
        self._answered: Callable[[], None] = lambda: None

    def boot(self) -> Boot:
        """Wait for the first message."""
        poll = select.poll()
        poll.register(self._control.fd, select.POLLIN)
        while not (messages := self._control.receive()):
            poll.poll()
        (_, boot), *self._early = messages
        assert isinstance(boot, Boot), f"the first message is {type(boot).__name__}, not Boot"
        return boot

    def watch(self, board: Board, host: int, ring: Callable[[], None]) -> None:
        """Learn from the board when messages have come, and tell the parent there, with `ring`, of answers."""

        def answered() -> None:
            board.add_answer(host)
            ring()

        self._post, self._answered = partial(board.post, host), answered

    def receive(self) -> Sequence[tuple[str, ToRank]]:
        self._seen_post = self._post()  # before looking, so that what comes meanwhile is looked for again
        if self._early:
            messages, self._early = self._early, []
            return messages
        return self._control.receive()

    def has_messages(self) -> bool:
        return self._post() != self._seen_post or bool(self._early)

    def answer(self, rank: str) -> Callable[[FromRank], None]:
        def emit(message: FromRank) -> None:
            self._control.send((rank, message))
            self._answered()

        return emit


class SettledLoads:
    """A `loading.Start` that takes what was loaded out of the garbage collector's sight.

    A full collection of a process that has torch loaded takes tenths of a second, and none of its lanes is served then.
    Nothing is collected first, since other models' lanes run meanwhile.
    """

    def __init__(self, start: Start) -> None:
        self._start = start

    def __call__(self, run: Callable[[], None], name: str) -> None:
        def settled() -> None:
            run()
            gc.freeze()

        self._start(settled, name)


def main(control_fd: int) -> int:
    """Boot, then run the host's loop until the parent says stop, or is gone; gives the exit code."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL)
    _die_with_parent()
    try:
        inbox = SocketInbox(ControlSocket(socket.socket(fileno=control_fd)))
        boot = inbox.boot()
        if os.getppid() != boot.parent_pid:
            return 0  # it died before the death signal was set
        set_up_rank_log(boot.config.log, boot.config.all_hosts[boot.host])
        return _run(boot, inbox)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the parent is gone, and so is every use for this process


def _run(boot: Boot, inbox: SocketInbox) -> int:
    """Tells the parent what ends the loop early: all it could see of that by itself is that the socket ends."""
    board = Board(boot.board)
    boot.board.close()
    parent = len(boot.doorbells) - 1
    inbox.watch(board, boot.host, ringer(boot.doorbells[parent], board, parent))
    loop = None
    try:
        check_return(boot)
        loads = SettledLoads(LoadThreads())
        loop = make_host_loop(boot.config, boot.host, boot.doorbells, board, inbox, loads, boot.config.spin_us)
        gc.collect()
        gc.freeze()
        loop.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as failure:
        ranks = boot.config.all_hosts[boot.host]
        if loop is not None or not isinstance(failure, ValueError):  # a wrong setting needs no traceback
            logger.exception("the process of %s ends", ", ".join(ranks))
        inbox.answer(ranks[0])(Ending(one_line(failure)))
        return 1
    return 0


def check_return(boot: Boot) -> None:
    """Raises ValueError for a host that was started again where its ranks cannot come back."""
    if boot.config.transport == "nvshmem" and boot.num_launches > 1:
        ranks = ", ".join(boot.config.all_hosts[boot.host])
        raise ValueError(
            f"{ranks} was lost, and NVSHMEM takes no rank back into its team; restart the deployment, or use transport "
            "peer, whose ranks come back alone"
        )


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent is gone: it reaches even a stopped process. Elsewhere the socket tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a load that is under way in a thread must not hold up the end
