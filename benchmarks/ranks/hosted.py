"""Hosts of ranks in threads, as processes run them: sockets, doorbells and loops are real."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from crosspool.cluster import messages
from crosspool.cluster.base import ModelPlacement
from crosspool.cluster.control import ControlSocket
from crosspool.cluster.doorbell import Board, Doorbell, ringer
from crosspool.cluster.host_loop import HostLoop
from crosspool.cluster.messages import FromRank, ToRank
from crosspool.cluster.rank_loop import RankLoop, RankSurroundings
from crosspool.cluster.rank_process import SocketInbox
from crosspool.cluster.region import Region
from crosspool.cluster.worker import RankWorker
from crosspool.scheduler.order import ORDER_POLICIES

SPIN_US = 200.0


@dataclass(frozen=True)
class RanksOfALane:
    """A KV rank and a weights rank by name, their model, what they need of a channel, and one sequence's pages.

    region: crosses the hosts' sockets, so only a file's bytes are the same on both sides.
    """

    workers: Mapping[str, RankWorker]
    placement: ModelPlacement
    capacity: int
    region: Region
    pages: tuple[tuple[int, ...], ...]


class Hosted:
    """One rank's host in a thread, and the parent's end of its socket."""

    def __init__(self, number: int, name: str, worker: RankWorker, board: Board, bells: list[Doorbell]) -> None:
        ours, theirs = socket.socketpair()
        self._number, self._name, self._board, self._bell = number, name, board, bells[number]
        self.control: ControlSocket[FromRank, ToRank] = ControlSocket(ours)
        inbox = SocketInbox(ControlSocket(theirs))
        parent = len(bells) - 1
        inbox.watch(board, number, ringer(bells[parent], board, parent))
        around = RankSurroundings(
            emit=inbox.answer(name),
            ring=lambda peer: lambda: None,
            wake=self._bell.ring,
            clock=time.perf_counter,
            order=ORDER_POLICIES["priority"],
            step_deadline_s=5.0,
            start=lambda run, name: run(),
        )
        self._host = HostLoop([RankLoop(name, worker, around)], inbox, self._bell, board, number, SPIN_US)
        self._thread = threading.Thread(target=self._host.run, daemon=True)
        self._thread.start()

    def send(self, message: ToRank) -> None:
        self.control.queue((self._name, message))
        self._board.add_post(self._number)

    def cpu_s(self) -> float:
        """Processor time of its thread so far."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def end(self) -> None:
        self.send(messages.Stop())
        self._bell.ring()
        self._thread.join()
