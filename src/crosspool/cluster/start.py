"""Start a cluster: doorbells and board first, then the hosts of the layout."""

from threadpoolctl import threadpool_limits

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.process_host import ProcessHost, Spawner
from crosspool.cluster.rank_cluster import RankCluster
from crosspool.cluster.region import ArrayRegion, FileRegion
from crosspool.cluster.thread_host import ThreadHost
from crosspool.cluster.turned_host import TurnedHost


def start_cluster(config: ClusterConfig) -> RankCluster:
    """The ranks of `config`, starting; a RankReady tells of each. The caller closes the cluster."""
    return _start_in_process(config) if config.layout == "inprocess" else _start_processes(config)


def _start_in_process(config: ClusterConfig) -> RankCluster:
    """All in this process, whose linear algebra library is held to `threads_per_rank` while the cluster lives.

    One host works in the thread that polls; several have a thread each. A GPU's host has one too:
    it looks at its words all the time.
    """
    limits = threadpool_limits(config.threads_per_rank, "blas")
    is_turned = len(config.all_hosts) == 1 and config.backend != "cuda"
    doorbells = [] if is_turned else [Doorbell.create() for _ in config.all_hosts]
    parent = Doorbell.create()
    board = Board(ArrayRegion(Board.num_bytes(len(config.all_hosts))))
    turned = [TurnedHost(config, board, parent)] if is_turned else []
    threads = [ThreadHost(config, number, doorbells, board, parent) for number in range(len(doorbells))]

    def release() -> None:
        limits.restore_original_limits()
        board.close()
        for doorbell in (*doorbells, parent):
            doorbell.close()

    return RankCluster(config, turned or threads, parent, board, ArrayRegion, release, turned=turned)


def _start_processes(config: ClusterConfig) -> RankCluster:
    doorbells = [Doorbell.create() for _ in config.all_hosts]
    parent = Doorbell.create()
    board_file = FileRegion.create(Board.num_bytes(len(doorbells)))
    board = Board(board_file)
    spawner = Spawner()
    everyone = (*doorbells, parent)
    hosts = [ProcessHost(config, number, everyone, board, board_file, spawner) for number in range(len(doorbells))]

    def release() -> None:
        spawner.close()
        board.close()
        board_file.close()
        for doorbell in (*doorbells, parent):
            doorbell.close()

    return RankCluster(config, hosts, parent, board, FileRegion.create, release)
