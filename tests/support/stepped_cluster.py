"""A whole cluster in one thread, moved one small step at a time: real parent, real loops, a clock that stands still.

Every interleaving of ranks, messages, crashes and hangs follows from one seed.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.loading import Start
from crosspool.cluster.make_worker import make_worker
from crosspool.cluster.messages import FromRank, ToRank
from crosspool.cluster.rank_cluster import RankCluster
from crosspool.cluster.rank_loop import RankLoop, RankSurroundings
from crosspool.cluster.region import ArrayRegion
from crosspool.scheduler.order import ORDER_POLICIES
from tests.support.loading import start_now


class SteppedHost:
    """A host (`cluster.host.Host`) whose ranks move only when `turn` is called."""

    def __init__(self, config: ClusterConfig, host: int, board: Board, clock: Callable[[], float]) -> None:
        self.ranks = config.all_hosts[host]
        self.pid = None
        self.is_alive = False
        self.is_frozen = False
        self.num_launches = 0
        self.num_shown = 0
        self.dies_at_launch = False
        self.start: Start = start_now  # runs loads
        self._config = config
        self._host = host
        self._board = board
        self._clock = clock
        self._loops: dict[str, RankLoop] = {}
        self._to_host: deque[tuple[str, ToRank]] = deque()
        self._from_host: deque[tuple[str, FromRank]] = deque()
        self._is_nudged = False

    def launch(self) -> None:
        self.num_launches += 1
        self.is_alive, self.is_frozen = not self.dies_at_launch, False
        self._to_host.clear()
        self._from_host.clear()
        self._loops = {rank: self._loop(rank) for rank in self.ranks}
        if self.is_alive:
            for loop in self._loops.values():
                loop.hello()

    def _loop(self, rank: str) -> RankLoop:
        config = self._config
        worker = make_worker(config, rank)
        around = RankSurroundings(
            emit=lambda message: self._from_host.append((rank, message)),
            ring=lambda peer: lambda: None,
            wake=lambda: None,
            clock=self._clock,
            order=ORDER_POLICIES[config.order],
            step_deadline_s=config.step_deadline_s,
            start=lambda run, name: self.start(run, name),
        )
        return RankLoop(rank, worker, around)

    def turn(self, rng: random.Random) -> bool:
        """One message or one segment; False if there is nothing to do, or it cannot move."""
        if not self.is_alive or self.is_frozen:
            return False
        if self._to_host or self._is_nudged or any(loop.is_busy for loop in self._loops.values()):
            self._is_nudged = False
            self._board.set_beat(self._host, self._board.beat(self._host) + 1)  # a real one sleeps otherwise
        if self._to_host and rng.random() < 0.5:
            rank, message = self._to_host.popleft()
            self._loops[rank].handle(message)
            return True
        loops = list(self._loops.values())
        rng.shuffle(loops)
        return any(loop.advance() for loop in loops) or bool(self._to_host)

    def die(self) -> None:
        """As if killed: what it has said arrives still, nothing else does."""
        self.is_alive = False

    def send(self, rank: str, message: ToRank) -> None:
        self._to_host.append((rank, message))

    def flush(self) -> bool:
        return False

    def receive(self) -> Sequence[tuple[str, FromRank]]:
        said = list(self._from_host)
        self._from_host.clear()
        if not said and not self.is_alive:
            raise EOFError
        return said

    def fd(self) -> int | None:
        return None

    def nudge(self) -> None:
        self._is_nudged = True

    def show_stacks(self) -> None:
        self.num_shown += 1

    def kill(self) -> bool:
        self.is_alive = False
        return True

    def last_words(self) -> str:
        return "killed in a test"

    def end(self, until_s: float) -> bool:
        self.is_alive = False
        return True


class SteppedCluster:
    """The cluster under test, its hosts and its clock. Poll it with a timeout of 0."""

    def __init__(self, config: ClusterConfig, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        board = Board(ArrayRegion(Board.num_bytes(len(config.all_hosts))))
        self.hosts = [SteppedHost(config, n, board, lambda: self.now_s) for n in range(len(config.all_hosts))]
        self.by_rank = {rank: host for host in self.hosts for rank in host.ranks}
        doorbell = Doorbell.create()
        self.cluster = RankCluster(
            config, self.hosts, doorbell, board, ArrayRegion, doorbell.close, clock=lambda: self.now_s
        )

    def turn(self, most: int = 40) -> None:
        """Up to `most` moves of ranks drawn at random; the clock moves a little, or far if nobody can."""
        have_moved = False
        for _ in range(self.rng.randrange(1, most)):
            have_moved |= self.rng.choice(self.hosts).turn(self.rng)
        self.now_s += 1e-3 if have_moved else 0.2
