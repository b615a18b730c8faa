"""Layout `inprocess` with one host: its ranks work in the thread that polls the cluster.

Python threads take the interpreter from each other; where engine and ranks are one thread, a step costs no hand-over.
"""

import logging
from collections.abc import Callable, Sequence

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.host import make_host_loop
from crosspool.cluster.host_loop import HostLoop
from crosspool.cluster.loading import LoadThreads
from crosspool.cluster.messages import FromRank, ToRank
from crosspool.cluster.thread_host import ThreadInbox

logger = logging.getLogger(__name__)


class TurnedHost:
    """A host that works when it is turned (`host.Host`). Who rings it rings the cluster, which turns it."""

    def __init__(self, config: ClusterConfig, board: Board, parent: Doorbell) -> None:
        (self.ranks,) = config.all_hosts
        self._config = config
        self._board = board
        self._parent = parent
        self._inbox = ThreadInbox(parent)
        self._loads = LoadThreads()
        self._loop: HostLoop | None = None
        self._error = ""

    @property
    def pid(self) -> int | None:
        return None

    def launch(self) -> None:
        try:
            self._loop = make_host_loop(self._config, 0, [self._parent], self._board, self._inbox, self._loads, 0.0)
            self._loop.begin()
        except Exception as failure:  # the cluster reports it as the end of these ranks
            self._end_by(failure)

    def turn(self, is_wanted: Callable[[], bool]) -> bool:
        """Run what is ready until it has something to say or its caller is wanted elsewhere; whether anything was."""
        has_worked = False
        try:
            while self._loop is not None and not self._inbox.from_host and not is_wanted():
                if not self._loop.work():
                    break
                has_worked = True
        except Exception as failure:  # as in `launch`
            self._end_by(failure)
        return has_worked

    def send(self, rank: str, message: ToRank) -> None:
        self._inbox.to_host.append((rank, message))

    def flush(self) -> bool:
        return False

    def receive(self) -> Sequence[tuple[str, FromRank]]:
        inbox = self._inbox.from_host
        said = [inbox.popleft() for _ in range(len(inbox))]
        if self._error and not said:
            raise EOFError(self._error)
        return said

    def fd(self) -> int | None:
        return None

    def nudge(self) -> None:
        """Its caller turns it anyway."""

    def show_stacks(self) -> None:
        """It hangs in this thread, and nobody is left to ask."""

    def kill(self) -> bool:
        return False

    def last_words(self) -> str:
        return self._error

    def end(self, until_s: float) -> bool:
        if self._loop is not None:
            self._loop.close()
        has_ended = self._loads.join(until_s)
        if not has_ended:
            logger.warning("a load of %s does not end; it is left behind", ", ".join(self.ranks))
        return has_ended

    def _end_by(self, failure: Exception) -> None:
        logger.exception("the ranks %s ended", ", ".join(self.ranks))
        self._error = f"{type(failure).__name__}: {failure}"
        self._loop = None
        self._parent.ring()
