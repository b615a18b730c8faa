"""Layout `inprocess` with a thread for each host; messages are plain objects, channels plain arrays."""

import faulthandler
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Board, Doorbell, ringer
from crosspool.cluster.host import make_host_loop
from crosspool.cluster.loading import LoadThreads
from crosspool.cluster.messages import FromRank, ToRank

logger = logging.getLogger(__name__)


class ThreadInbox:
    """Messages to and from a host that is a thread (`host_loop.Inbox`)."""

    fds: Sequence[int] = ()

    def __init__(self, parent: Doorbell) -> None:
        self.to_host: deque[tuple[str, ToRank]] = deque()
        self.from_host: deque[tuple[str, FromRank]] = deque()
        self._parent = parent

    def receive(self) -> Sequence[tuple[str, ToRank]]:
        return [self.to_host.popleft() for _ in range(len(self.to_host))]

    def has_messages(self) -> bool:
        return bool(self.to_host)

    def answer(self, rank: str) -> Callable[[FromRank], None]:
        def emit(message: FromRank) -> None:
            self.from_host.append((rank, message))
            self._parent.ring()

        return emit


class ThreadHost:
    """A host that is a daemon thread (`host.Host`). It cannot be killed, so it is never started a second time."""

    def __init__(
        self, config: ClusterConfig, host: int, doorbells: Sequence[Doorbell], board: Board, parent: Doorbell
    ) -> None:
        self.ranks = config.all_hosts[host]
        self._config = config
        self._host = host
        self._doorbells = doorbells
        self._board = board
        self._parent = parent
        self._inbox = ThreadInbox(parent)
        self._ring = ringer(doorbells[host], board, host)
        self._loads = LoadThreads()
        self._error = ""
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"crosspool-{self.ranks[0]}", daemon=True)

    @property
    def pid(self) -> int | None:
        return None

    def launch(self) -> None:
        self._thread.start()

    def send(self, rank: str, message: ToRank) -> None:
        self._inbox.to_host.append((rank, message))
        self._ring()

    def flush(self) -> bool:
        return False

    def receive(self) -> Sequence[tuple[str, FromRank]]:
        has_ended = self._has_ended
        inbox = self._inbox.from_host
        said = [inbox.popleft() for _ in range(len(inbox))]
        if has_ended and not said:
            raise EOFError(self._error)
        return said

    def fd(self) -> int | None:
        return None

    def nudge(self) -> None:
        self._doorbells[self._host].ring()

    def show_stacks(self) -> None:
        faulthandler.dump_traceback()

    def kill(self) -> bool:
        return False

    def last_words(self) -> str:
        return self._error or "its thread ended"

    def end(self, until_s: float) -> bool:
        self._thread.join(max(0.0, until_s - time.monotonic()))
        has_ended = not self._thread.is_alive() and self._loads.join(until_s)  # loads ring this host's doorbell
        if not has_ended:
            logger.warning("the thread of %s, or a load in it, does not end; it is left behind", ", ".join(self.ranks))
        return has_ended

    def _run(self) -> None:
        try:
            # Threads ring each other and sleep at once; a GPU rings nobody.
            spin_us = self._config.spin_us if self._config.backend == "cuda" else 0.0
            make_host_loop(
                self._config, self._host, self._doorbells, self._board, self._inbox, self._loads, spin_us
            ).run()
        except Exception as failure:  # the cluster reports it as the end of these ranks
            logger.exception("the thread of %s ended", ", ".join(self.ranks))
            self._error = f"{type(failure).__name__}: {failure}"
        finally:
            self._has_ended = True
            self._parent.ring()
