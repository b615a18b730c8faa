"""Host: the seam between the cluster and the thread or process where some of its ranks live."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Board, Doorbell, ringer
from crosspool.cluster.host_loop import HostLoop, Inbox
from crosspool.cluster.loading import Start
from crosspool.cluster.make_worker import join_workers, make_worker
from crosspool.cluster.messages import FromRank, ToRank
from crosspool.cluster.rank_loop import RankLoop, RankSurroundings
from crosspool.scheduler.order import ORDER_POLICIES


class Host(Protocol):
    """One thread or process with its ranks, as the parent sees it. Only `launch`, `kill` and `end` may block."""

    ranks: tuple[str, ...]

    @property
    def pid(self) -> int | None:
        """Its process, if it has one of its own and is not known to have ended."""
        ...

    def launch(self) -> None:
        """Start it, for the first time or after its end; messages may be sent at once."""
        ...

    def send(self, rank: str, message: ToRank) -> None: ...

    def flush(self) -> bool:
        """Send what could not be sent before; True if something is left."""
        ...

    def receive(self) -> Sequence[tuple[str, FromRank]]:
        """What its ranks have said. Raises EOFError once it has ended and all is read."""
        ...

    def fd(self) -> int | None:
        """The descriptor that becomes readable with a message; None if it rings the parent's doorbell instead."""
        ...

    def nudge(self) -> None:
        """Wake it, so that it beats if it can."""
        ...

    def show_stacks(self) -> None:
        """Before it is ended because it hangs: have it write to the log where its threads are, if it can."""
        ...

    def kill(self) -> bool:
        """End it from outside if it has not ended by itself; False where that is impossible."""
        ...

    def last_words(self) -> str:
        """How it ended, in a few words."""
        ...

    def end(self, until_s: float) -> bool:
        """After a `Stop`: wait for its end up to `until_s` (time.monotonic), then kill it. False if it lives on."""
        ...


def make_host_loop(
    config: ClusterConfig,
    host: int,
    doorbells: Sequence[Doorbell],
    board: Board,
    inbox: Inbox,
    start_load: Start,
    spin_us: float,
) -> HostLoop:
    """The loop of one host with the workers of its ranks; called in the thread that will run it."""
    host_of = {rank: number for number, ranks in enumerate(config.all_hosts) for rank in ranks}

    def ring(peer: str) -> Callable[[], None]:
        return ringer(doorbells[host_of[peer]], board, host_of[peer])

    loops = []
    workers = {rank: make_worker(config, rank) for rank in config.all_hosts[host]}
    join_workers(config, workers)
    for rank, worker in workers.items():
        around = RankSurroundings(
            emit=inbox.answer(rank),
            ring=ring,
            wake=doorbells[host].ring,
            clock=time.perf_counter,
            order=ORDER_POLICIES[config.order],
            step_deadline_s=config.step_deadline_s,
            start=start_load,
        )
        loops.append(RankLoop(rank, worker, around))
    return HostLoop(loops, inbox, doorbells[host], board, host, spin_us)
