"""Start a cluster: doorbells and board first, then the hosts of the layout."""

from threadpoolctl import threadpool_limits

from crosspool.cluster.config import ClusterConfig
from crosspool.cluster.doorbell import Board, Doorbell
from crosspool.cluster.local import ThreadHost
from crosspool.cluster.processes import ProcessHost, Spawner
from crosspool.cluster.rank_cluster import RankCluster
from crosspool.cluster.region import ArrayRegion, FileRegion


def start_cluster(config: ClusterConfig) -> RankCluster:
    """The ranks of `config`, starting; a RankReady tells of each. The caller closes the cluster."""
    return _start_threads(config) if config.layout == "inprocess" else _start_processes(config)


def _start_threads(config: ClusterConfig) -> RankCluster:
    """All in this process, whose linear algebra library is held to `threads_per_rank` while the cluster lives."""
    limits = threadpool_limits(config.threads_per_rank, "blas")
    doorbells = [Doorbell.create() for _ in config.all_hosts]
    parent = Doorbell.create()
    board = Board(ArrayRegion(Board.num_bytes(len(doorbells))))
    hosts = [ThreadHost(config, number, doorbells, board, parent) for number in range(len(doorbells))]

    def release() -> None:
        limits.restore_original_limits()
        board.close()
        for doorbell in (*doorbells, parent):
            doorbell.close()

    return RankCluster(config, hosts, parent, board, ArrayRegion, release)


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
